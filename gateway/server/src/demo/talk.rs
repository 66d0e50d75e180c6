//! The demo's conversations.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::client::{Answer, chat};
use super::fleet::{Fleet, MODEL};

/// Each with a system prompt of its own: more than there are engines.
pub const CONVERSATIONS: usize = 7;
/// The first of each is cold, the others are warm.
const TURNS: usize = 4;

/// One answered question.
pub struct Turn {
    pub conversation: usize,
    pub turn: usize,
    pub answer: Answer,
}

/// How a policy did.
#[derive(Default)]
pub struct Talk {
    /// In the order in which they were asked.
    pub turns: Vec<Turn>,
    /// Requests without a good answer.
    pub errors: usize,
    /// Why the first of these failed.
    pub first_error: Option<String>,
}

impl Talk {
    /// Cached over all prompt tokens, as the engines report.
    pub fn hit_rate(&self) -> f64 {
        let sum = |of: fn(&Answer) -> u64| self.turns.iter().map(|t| of(&t.answer)).sum::<u64>() as f64;
        sum(|a| a.cached_tokens) / sum(|a| a.prompt_tokens).max(1.0)
    }

    /// A percentile of the time to first token, in milliseconds.
    pub fn ttft_ms(&self, percent: usize) -> f64 {
        let mut all: Vec<f64> = self.turns.iter().map(|t| t.answer.ttft.as_secs_f64() * 1e3).collect();
        all.sort_by(f64::total_cmp);
        let at = (all.len() * percent).div_ceil(100).saturating_sub(1);
        all.get(at).copied().unwrap_or(0.0)
    }

    /// Requests by endpoint.
    pub fn per_endpoint(&self) -> BTreeMap<&str, usize> {
        let mut counts = BTreeMap::new();
        for turn in &self.turns {
            *counts.entry(turn.answer.endpoint.as_str()).or_default() += 1;
        }
        counts
    }
}

/// Leads all conversations, turn by turn and one request at a time, through the fleet's gateway.
pub async fn lead(fleet: &Fleet) -> Talk {
    let mut histories: Vec<Vec<Value>> = (0..CONVERSATIONS).map(|c| vec![system(c)]).collect();
    let mut talk = Talk::default();
    for turn in 0..TURNS {
        for (conversation, history) in histories.iter_mut().enumerate() {
            history.push(json!({"role": "user", "content": question(conversation, turn)}));
            match chat(fleet.gateway, MODEL, history, None).await {
                Ok(answer) => {
                    history.push(json!({"role": "assistant", "content": answer.text}));
                    talk.turns.push(Turn { conversation, turn, answer });
                }
                Err(error) => {
                    talk.errors += 1;
                    talk.first_error.get_or_insert(error);
                }
            }
        }
    }
    talk
}

const SUBJECTS: [&str; CONVERSATIONS] = [
    "railway signalling",
    "bread baking",
    "tidal power",
    "medieval law",
    "beekeeping",
    "cartography",
    "violin making",
];

/// Some 600 tokens, of which no two conversations share more than a few.
pub fn system(conversation: usize) -> Value {
    let subject = SUBJECTS.get(conversation).copied().unwrap_or("everything");
    let rules = (1..=24).map(|n| {
        format!(
            "{n}. When a question about {subject} touches chapter {n}, quote paragraph {} of the {subject} handbook \
             before you answer.",
            (conversation + 3) * n
        )
    });
    let rules: Vec<_> = rules.collect();
    json!({"role": "system", "content": format!("You answer questions about {subject}.\n{}", rules.join("\n"))})
}

pub fn question(conversation: usize, turn: usize) -> String {
    let subject = SUBJECTS.get(conversation).copied().unwrap_or("everything");
    format!(
        "Question {} on {subject}: what does chapter {} say, and why?",
        turn + 1,
        (turn * 5 + conversation) % 24 + 1
    )
}
