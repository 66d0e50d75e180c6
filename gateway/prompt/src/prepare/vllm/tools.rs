//! Tools, read and written again through vLLM's schema (`ChatCompletionToolsParam`, `FunctionDefinition`).

use minijinja::value::Value;

use super::message::take;
use super::options::{self, refused};
use crate::json::Json;
use crate::template::python;
use crate::{Fields, TokenizeError};

/// The tools as the template sees them: known keys only, in the schema's order, missing ones as `None`.
pub(super) fn read(fields: &Fields<'_>) -> Result<Option<Value>, TokenizeError> {
    let tools = options::value(fields, "tools")?;
    let choice = fields.raw("tool_choice").unwrap_or("null");
    if tools.is_none() && !matches!(choice, "null" | "\"none\"") {
        return Err(refused("tool_choice without tools"));
    }
    match tools {
        None => Ok(None),
        Some(Json::List(items)) if !items.is_empty() => {
            items.into_iter().map(tool).collect::<Result<Vec<_>, _>>().map(|tools| Some(Value::from(tools)))
        }
        Some(_) => Err(refused("tools must be a list with at least one tool")),
    }
}

fn tool(json: Json<'_>) -> Result<Value, TokenizeError> {
    let mut tool = json;
    if take(&mut tool, "type").is_some_and(|kind| kind.as_str() != Some("function")) {
        return Err(refused("a tool that is not a function"));
    }
    let mut function = take(&mut tool, "function").ok_or_else(|| refused("a tool without function"))?;
    let defer = take(&mut tool, "defer_loading").filter(|d| !d.is_null());
    let name = take(&mut function, "name").filter(|n| n.as_str().is_some());
    let name = name.ok_or_else(|| refused("a tool without a name"))?;
    let description = take(&mut function, "description").unwrap_or(Json::Null);
    let parameters = take(&mut function, "parameters").unwrap_or(Json::Null);
    if !matches!(description, Json::Null | Json::Str(_)) || !matches!(parameters, Json::Null | Json::Dict(_))
    {
        return Err(refused("a tool whose description or parameters have the wrong type"));
    }
    let mut known = vec![("name", name), ("description", description), ("parameters", parameters)];
    if let Some(strict) = take(&mut function, "strict").filter(|s| !s.is_null()) {
        known.push(("strict", strict));
    }
    let inner = take(&mut function, "defer_loading").filter(|d| !d.is_null());
    if let Some(defer) = inner.or_else(|| defer.clone()) {
        known.push(("defer_loading", defer));
    }
    let function = Value::from_pairs(known.into_iter().map(|(k, v)| (k, python::value(v))));
    let mut pairs = vec![("type", Value::from("function")), ("function", function)];
    if let Some(defer) = defer {
        pairs.push(("defer_loading", python::value(defer)));
    }
    Ok(Value::from_pairs(pairs))
}
