//! The demo of a rule whose requests are served by two engines each.

use std::collections::BTreeMap;
use std::fmt::Write;

use kvgate_sim::{Role, Served, Sim};
use serde_json::{Value, json};

use super::client::{Answer, chat};
use super::fleet::{Fleet, MODEL};
use super::talk::{question, system};

pub const OPENING: &str = "\
Five simulated engines and a gateway start on loopback ports: three engines compute prompts,
two compute answers from the blocks that they fetch from the first three. Requests of four
kinds, one after the other, show what each tier of the ladder is for.
";

/// The tiers of the usual ladder, in its order.
const TIERS: [&str; 4] = ["session", "radix-trie", "kv-exact", "min-load"];
const SUBJECTS: usize = 3;

/// A request and what became of it.
struct Asked {
    kind: &'static str,
    answer: Answer,
    /// Both engines have it in their logs, and the prompt was computed once.
    agrees: bool,
}

/// How the requests did.
#[derive(Default)]
pub struct Shown {
    asked: Vec<Asked>,
    /// Why requests failed.
    failed: Vec<String>,
    /// Requests in the logs of the engines, by address.
    prefills: BTreeMap<String, usize>,
    decodes: BTreeMap<String, usize>,
}

/// Asks all of it through the fleet's gateway.
pub async fn lead(fleet: &Fleet) -> Shown {
    let mut shown = Shown::default();
    let mut histories: Vec<Vec<Value>> = (0..SUBJECTS).map(|subject| vec![system(subject)]).collect();
    for turn in 0..3 {
        for (subject, history) in histories.iter_mut().enumerate() {
            history.push(json!({"role": "user", "content": question(subject, turn)}));
            let kind = if turn == 0 { "a conversation begins" } else { "it goes on" };
            let conversation = format!("conversation-{subject}");
            if let Some(text) = shown.ask(fleet, kind, history, Some(&conversation)).await {
                history.push(json!({"role": "assistant", "content": text}));
            }
        }
    }
    for subject in 0..SUBJECTS {
        let messages = [system(subject), json!({"role": "user", "content": question(subject, 7)})];
        shown.ask(fleet, "somebody else asks of the same subject", &messages, None).await;
    }
    for letter in 0..3 {
        let messages = [json!({"role": "user", "content": letter_of(letter)})];
        shown.ask(fleet, "a long letter after a short instruction", &messages, None).await;
    }
    let legs = |role: Role| {
        let engines = fleet.engines.iter().filter(move |engine| engine.config().role == role);
        engines.map(|engine| (engine.address().to_string(), engine.log().len())).collect()
    };
    (shown.prefills, shown.decodes) = (legs(Role::Prefill), legs(Role::Decode));
    shown
}

/// Few words that are the same, many that are not.
fn letter_of(letter: usize) -> String {
    let mut text = "Summarise the following letter in three sentences, in the language it is written in. Name the sender, \
                    what is asked for, and until when. Do not add anything that the letter does not say.\n\n"
        .to_owned();
    for line in 0..60 {
        let _ = writeln!(
            text,
            "{}. Paragraph {} of letter {letter} speaks of matter {}.",
            line + letter * 100,
            line * 7,
            line * letter + 3
        );
    }
    text
}

fn log_of(engines: &[Sim], address: &str, id: &str) -> Option<Served> {
    let engine = engines.iter().find(|engine| engine.address().to_string() == address)?;
    engine.log().into_iter().find(|served| served.request_id.as_deref() == Some(id))
}

impl Shown {
    /// One request; the text of its answer.
    async fn ask(
        &mut self,
        fleet: &Fleet,
        kind: &'static str,
        messages: &[Value],
        conversation: Option<&str>,
    ) -> Option<String> {
        let answer = match chat(fleet.gateway, MODEL, messages, conversation).await {
            Ok(answer) => answer,
            Err(error) => {
                self.failed.push(error);
                return None;
            }
        };
        let prefill = log_of(&fleet.engines, &answer.prefill, &answer.id);
        let decode = log_of(&fleet.engines, &answer.endpoint, &answer.id);
        let agrees = prefill.is_some() && decode.is_some_and(|served| served.received_tokens > 0);
        let text = answer.text.clone();
        self.asked.push(Asked { kind, answer, agrees });
        Some(text)
    }

    fn requests(&self) -> usize {
        self.asked.len() + self.failed.len()
    }

    /// Requests without a good answer, or of which the engines know something else.
    fn errors(&self) -> usize {
        self.failed.len() + self.asked.iter().filter(|asked| !asked.agrees).count()
    }

    fn tiers_won(&self) -> BTreeMap<&'static str, usize> {
        let won = |tier: &str| self.asked.iter().filter(|asked| asked.answer.prefill_tier == tier).count();
        TIERS.iter().map(|tier| (*tier, won(tier))).collect()
    }

    /// Nothing failed, every tier won, and the engines were asked as often as that.
    pub fn is_won(&self) -> bool {
        let won = self.tiers_won();
        let legs = |by: &BTreeMap<String, usize>| by.values().sum::<usize>();
        self.errors() == 0
            && won.values().all(|n| *n > 0)
            && [won.values().sum(), legs(&self.prefills), legs(&self.decodes)] == [self.requests(); 3]
    }

    /// The result as JSON.
    pub fn json(&self) -> Value {
        json!({
            "requests": self.requests(),
            "errors": self.errors(),
            "tiers_won": self.tiers_won(),
            "per_endpoint": {"prefill": self.prefills, "decode": self.decodes},
        })
    }

    /// The result for a reader.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let mut line = |words: std::fmt::Arguments<'_>| {
            let _ = writeln!(text, "{words}");
        };
        line(format_args!("\nWhich engines computed each prompt and each answer, and why:\n"));
        line(format_args!(
            "  {:<40}  {:<15}  {:<10}  {:<15}  {:<8}  tokens",
            "request", "prefill", "chosen by", "decode", "chosen by"
        ));
        for Asked { kind, answer: a, .. } in &self.asked {
            line(format_args!(
                "  {kind:<40}  {:<15}  {:<10}  {:<15}  {:<9}  {:>6}",
                a.prefill, a.prefill_tier, a.endpoint, a.tier, a.prompt_tokens
            ));
        }
        line(format_args!("\n  session: the engines of the conversation, by X-Conversation-Id"));
        line(format_args!("  radix-trie: the engine that was given the longest part of this text before"));
        line(format_args!(
            "  kv-exact: the engine that announced the longest part of the prompt; less than 20 % of its text, so radix-trie passes"
        ));
        line(format_args!("  min-load: nobody knows the prompt, so the least loaded engine\n"));
        for (tier, won) in self.tiers_won() {
            line(format_args!("  {tier:<12}{won:>3} requests"));
        }
        for (leg, by) in [("prefill", &self.prefills), ("decode", &self.decodes)] {
            let counts: Vec<_> = by.values().map(ToString::to_string).collect();
            line(format_args!(
                "  {leg:<12}{:>3} requests in the engines' own logs: {}",
                by.values().sum::<usize>(),
                counts.join(" / ")
            ));
        }
        for error in &self.failed {
            line(format_args!("\nFailed: {error}"));
        }
        let verdict = if self.is_won() {
            "Won: every tier chose some, the engines' logs agree, and no prompt was computed twice."
        } else {
            "Not won: every tier should choose some, and the engines' logs should agree."
        };
        line(format_args!("\n{verdict}"));
        text
    }
}
