//! Which tokens end a turn: found by rendering a chat and looking at what follows each message.

use minijinja::value::Value;

use crate::template::{ChatTemplate, ContentFormat};

/// Contents that no template writes by itself.
const MARKS: [&str; 3] = ["kvgateAlpha", "kvgateBravo", "kvgateCharlie"];

/// The first of `tokens` after each message of a rendered chat, each once. Empty where the template refuses the chat.
pub(super) fn ends(template: &ChatTemplate, special: &[(String, Value)], tokens: &[String]) -> Vec<String> {
    let mut ends = Vec::new();
    let Some(text) = sample(template, special) else { return ends };
    for mark in MARKS {
        let Some((_, rest)) = text.split_once(mark) else { continue };
        let first = tokens.iter().filter_map(|token| Some((rest.find(token.as_str())?, token)));
        // of two at one place the tokenizer takes the longer one
        let first = first.min_by_key(|(at, token)| (*at, std::cmp::Reverse(token.len())));
        if let Some((_, token)) = first.filter(|(_, token)| !ends.contains(*token)) {
            ends.push(token.clone());
        }
    }
    ends
}

fn sample(template: &ChatTemplate, special: &[(String, Value)]) -> Option<String> {
    let message = |(role, content): (&str, &str)| {
        let content = match template.content_format() {
            ContentFormat::String => Value::from(content),
            ContentFormat::OpenAi => Value::from(vec![Value::from_pairs([
                ("type", Value::from("text")),
                ("text", Value::from(content)),
            ])]),
        };
        Value::from_pairs([("role", Value::from(role)), ("content", content)])
    };
    let turns = ["user", "assistant", "user"].into_iter().zip(MARKS);
    let with_system = [("system", "kvgate")].into_iter().chain(turns.clone()).map(message);
    let chats = [turns.map(message).collect::<Value>(), with_system.collect()];
    chats.into_iter().find_map(|messages| {
        let own = [
            ("messages", messages),
            ("tools", Value::from(())),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(true)),
        ];
        let own = own.map(|(name, value)| (name.to_owned(), value));
        template.render_value(Value::from_pairs(special.iter().cloned().chain(own))).ok()
    })
}
