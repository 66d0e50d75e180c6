//! What clients send.

use serde_json::Value;

use crate::json::{self, Json, Members};
use crate::request::Fields;

/// A request's body: what is read of it is what a strict reader reads, where that reads it at all.
pub fn body(data: &[u8]) {
    let fields = Fields::read(data);
    let strict = serde_json::from_slice::<Value>(data);
    if let Ok(Value::Object(object)) = &strict {
        let fields = fields.as_ref().expect("a strict reader reads it");
        let wanted = |name: &str| object.get(name).and_then(Value::as_str);
        assert_eq!(fields.model.as_deref(), wanted("model"));
        assert_eq!(fields.user.as_deref(), wanted("user"));
        assert_eq!(fields.cache_salt.as_deref(), wanted("cache_salt"));
        assert_eq!(fields.stream, object.get("stream") == Some(&Value::Bool(true)));
        for (raw, name) in [(fields.prompt, "prompt"), (fields.messages, "messages")] {
            let raw = raw.map(|raw| serde_json::from_str::<Value>(raw).expect("a value as written"));
            assert_eq!(raw.as_ref(), object.get(name));
        }
    }
    let Some(text) = json::text(data) else {
        assert!(fields.is_none(), "fields of what is no text");
        return;
    };
    for member in Members::new(text).map_while(Result::ok) {
        assert_eq!(text.get(member.at..member.at + member.value.len()), Some(member.value));
    }
    let tree = Json::parse(text);
    if let Ok(value) = &strict {
        match tree {
            Ok(tree) => assert!(same(&tree, value), "{tree:?} and {value}"),
            Err(json::JsonError::Depth | json::JsonError::Size) => {}
            Err(error) => panic!("{error} of {value}"),
        }
    }
}

/// Whether two readers read the same.
fn same(ours: &Json<'_>, theirs: &Value) -> bool {
    match (ours, theirs) {
        (Json::Null, Value::Null) => true,
        (Json::Bool(a), Value::Bool(b)) => a == b,
        (Json::Int(a), Value::Number(b)) => a.parse::<i128>().ok() == b.as_i128() || b.is_f64(),
        (Json::Float(a), Value::Number(b)) => Some(*a) == b.as_f64(),
        (Json::Str(a), Value::String(b)) => a == b,
        (Json::List(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Json::Dict(_), Value::Object(b)) => b.iter().all(|(k, v)| ours.get(k).is_some_and(|o| same(o, v))),
        _ => false,
    }
}
