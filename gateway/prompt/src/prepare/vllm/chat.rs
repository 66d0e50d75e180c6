//! From a chat request to the text that is tokenised (`renderers/hf.py`, and what transformers does in it).

use minijinja::value::Value;

use super::message::Message;
use super::options::{self, refused};
use super::tools;
use crate::json::Json;
use crate::template::{ChatTemplate, python};
use crate::{Fields, Model, TokenizeError};

/// Marks where the final message ends when it is to be continued; the name is transformers' own.
const CONTINUE: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// Renders the chat of a request.
pub(super) fn render(model: &Model, fields: &Fields<'_>, messages: &str) -> Result<String, TokenizeError> {
    if options::given(fields, "chat_template") {
        return Err(refused("a chat template of the request's own"));
    }
    let tools = tools::read(fields)?;
    let generate = options::flag(fields, "add_generation_prompt", true)?;
    let resume = options::flag(fields, "continue_final_message", false)?;
    if generate && resume {
        return Err(refused("continue_final_message with add_generation_prompt"));
    }
    let variables = variables(model, fields, tools, generate)?;
    let has_tools = variables.iter().any(|(name, value)| name == "tools" && !value.is_none());
    let template = model.template(has_tools)?;
    let mut conversation = conversation(messages, template)?;
    let end = match conversation.last_mut() {
        None => return Err(refused("no messages")),
        Some(last) if resume => Some(last.mark_end(CONTINUE).ok_or_else(|| refused("no text to continue"))?),
        Some(_) => None,
    };
    let messages = conversation.into_iter().map(Message::into_value).collect::<Value>();
    let context = Value::from_pairs(variables.into_iter().chain([("messages".to_owned(), messages)]));
    let text =
        template.render_value(context).map_err(|e| TokenizeError::from(format!("chat template: {e}")))?;
    match end {
        Some(last) => cut_at_end(text, &last),
        None => Ok(text),
    }
}

fn conversation<'a>(raw: &'a str, template: &ChatTemplate) -> Result<Vec<Message<'a>>, TokenizeError> {
    let json = Json::parse(raw).map_err(|e| TokenizeError::from(format!("messages: {e}")))?;
    let Json::List(items) = json else { return Err(refused("messages that are not a list")) };
    let format = template.content_format();
    let messages =
        items.into_iter().map(|item| Message::read(item, format)).collect::<Result<Vec<_>, _>>()?;
    if template.knows_developer() || !messages.iter().any(|m| m.role == "developer") {
        return Ok(messages);
    }
    Ok(without_developer(messages))
}

/// For templates that do not know the role: developer messages become system messages, and all system messages one,
/// the first, unless there is only that.
fn without_developer(messages: Vec<Message<'_>>) -> Vec<Message<'_>> {
    let messages: Vec<_> =
        messages.into_iter().map(|m| if m.role == "developer" { m.into_system() } else { m }).collect();
    if messages.iter().skip(1).all(|m| m.role != "system") {
        return messages;
    }
    let (system, rest): (Vec<_>, Vec<_>) = messages.into_iter().partition(|m| m.role == "system");
    let texts: Vec<_> = system.iter().map(|m| m.content.joined()).filter(|text| !text.is_empty()).collect();
    std::iter::once(Message::system(texts.join("\n\n"))).chain(rest).collect()
}

/// Everything but the messages that the template can see: special tokens, then `chat_template_kwargs`, then the
/// request's own fields, the later winning.
fn variables(
    model: &Model,
    fields: &Fields<'_>,
    tools: Option<Value>,
    generate: bool,
) -> Result<Vec<(String, Value)>, TokenizeError> {
    let mut variables: Vec<(String, Value)> = model.special().to_vec();
    variables.push(("tools".into(), tools.unwrap_or_else(|| Value::from(()))));
    variables.push(("documents".into(), Value::from(())));
    let mut thinking_given = false;
    match options::value(fields, "chat_template_kwargs")? {
        None => (),
        Some(Json::Dict(members)) => {
            for (name, value) in members {
                thinking_given |= name == "enable_thinking";
                if value.is_null() || value.as_str() == Some("auto") {
                    continue;
                }
                match name.as_ref() {
                    "chat_template" | "tokenize" | "messages" | "conversation" | "model_config"
                    | "tokenizer" => {
                        return Err(refused(&format!("chat_template_kwargs.{name}")));
                    }
                    _ => variables.push((name.into_owned(), python::value(value))),
                }
            }
        }
        Some(_) => return Err(refused("chat_template_kwargs that are not an object")),
    }
    if let Some(documents) = options::value(fields, "documents")? {
        variables.push(("documents".into(), python::value(documents)));
    }
    if let Some(effort) = options::value(fields, "reasoning_effort")? {
        if !thinking_given {
            variables.push(("enable_thinking".into(), Value::from(effort.as_str() != Some("none"))));
        }
        variables.push(("reasoning_effort".into(), python::value(effort)));
    }
    variables.push(("add_generation_prompt".into(), Value::from(generate)));
    Ok(variables)
}

/// Cuts the rendered chat where the final message ends (transformers 5, `render_jinja_template`).
fn cut_at_end(mut text: String, last: &str) -> Result<String, TokenizeError> {
    let tag = text.rfind(CONTINUE.trim_end()).filter(|_| text.contains(python::strip(last)));
    let tag = tag.ok_or_else(|| refused("the template drops the message to continue"))?;
    let spaced = text.get(tag..).is_some_and(|rest| rest.starts_with(CONTINUE));
    text.truncate(tag);
    if !spaced {
        text.truncate(text.trim_end_matches(python::is_space).len());
    }
    Ok(text)
}
