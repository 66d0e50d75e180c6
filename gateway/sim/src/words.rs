//! The words that simulated engines speak: ids of the model's own vocabulary whose text reads back to the same ids.

use kvgate_prompt::Model;
use std::collections::HashMap;
use std::sync::Arc;

/// Common words; those that a tokenizer knows as one token, with the space before it, are used.
const WORDS: &str = "about above after again against all almost alone along already also always among and another answer any \
    are area around ask away back bad became because become been before began behind being best better between big both \
    brought business call came can cannot case certain change city clear close come could country course day did different \
    does done door down during each early east end enough even ever every example eye face fact family far feel few field \
    find first food for form found four free from full gave general get girl give given goes going good government great \
    green group had half hand hard has have head hear held help her here high him himself his hold home hour house how \
    however human idea important inside into its just keep kind knew know land large last late later law leave left less let \
    letter life light like line little live local long look made make man many may mean might mind more morning most mother \
    move much music must name national near need never new next night not nothing now number off often old once one only open \
    order other our out over own page paper part party past people perhaps person place plan play point power present problem \
    program public put question quite rather read real reason red right river road room run said same saw say school sea \
    second see seem sense service set several shall she should show side since six small social some something sometimes soon \
    sound south space start state stay still story street strong study such sun system table take tell ten than that the \
    their them then there these they thing think this those though thought three through time today together told too took \
    toward town tree turn two type under until upon use very voice walk wall want war was watch water way week well went were \
    west what when where whether which while white who whole whose why will wind with within without woman word work world \
    would write year yet you young";

/// Fewest words to speak with.
const ENOUGH: usize = 16;

/// What an engine can say.
pub(crate) struct Words {
    ids: Arc<[u32]>,
    text: HashMap<u32, String>,
}

impl Words {
    /// The words that are single tokens of `model`; `None` when there are too few to speak with.
    pub fn new(model: &Model) -> Option<Self> {
        let mut ids = Vec::new();
        let mut text = HashMap::new();
        for word in WORDS.split_whitespace() {
            let spaced = format!(" {word}");
            if let Ok(tokens) = model.encode(&spaced, false)
                && let [id] = *tokens
                && text.insert(id, spaced).is_none()
            {
                ids.push(id);
            }
        }
        (ids.len() >= ENOUGH).then(|| Self { ids: ids.into(), text })
    }

    /// The ids.
    pub fn ids(&self) -> Arc<[u32]> {
        self.ids.clone()
    }

    /// The text of an id of [`Words::ids`].
    pub fn text(&self, id: u32) -> &str {
        self.text.get(&id).map_or("", String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvgate_prompt::{State, Tokenizers, TokenizersConfig};

    #[test]
    fn a_text_of_words_reads_back_to_its_ids() {
        let store = Tokenizers::new(kvgate_tests::tokenizers(), TokenizersConfig::default());
        for name in ["tiny-qwen3", "tiny-words"] {
            let State::Ready(model) = store.load(name) else { panic!("no tokenizer") };
            let words = Words::new(&model).unwrap();
            assert!(words.ids().len() > 300, "{}", words.ids().len());
            let text: String = words.ids().iter().map(|id| words.text(*id)).collect();
            assert_eq!(model.encode(&text, false).unwrap(), words.ids());
        }
    }
}
