//! Edits of a JSON object's top-level members that leave every other byte as it is.

use bytes::{Bytes, BytesMut};
use kvgate_prompt::json::{self, Members};

/// What becomes of a member, however often and with whatever escapes its name is written.
#[derive(Debug, Clone, Copy)]
pub(super) enum Edit<'a> {
    /// The value is replaced where the member is written first, and the others are left out: values do not multiply.
    Replace(&'a str),
    /// As [`Edit::Replace`]; where the member is not written it is added at the end.
    Put(&'a str),
    /// The member is left out.
    Drop,
}

/// Applies `edits`, by member name; `None` if `body` is no JSON object in UTF-8. Values must be JSON.
///
/// A left-out member takes the white space and the comma before it along, the first one those after it.
pub(super) fn splice(body: &Bytes, edits: &[(&str, Edit<'_>)]) -> Option<Bytes> {
    let text = json::text(body)?;
    let mut out = Output::new(body, text, edits);
    let mut written = vec![false; edits.len()];
    for member in Members::new(text) {
        let member = member.ok()?;
        let end = member.at + member.value.len();
        let key = member.key.as_deref();
        let edit = edits.iter().zip(&mut written).find(|((name, _), _)| Some(*name) == key);
        match edit {
            None => out.keep(member.start, end)?,
            Some(((_, Edit::Drop), _) | (_, true)) => out.drop(member.start, end)?,
            Some(((_, Edit::Replace(value) | Edit::Put(value)), written)) => {
                *written = true;
                out.keep(member.start, member.at)?;
                out.bytes.extend_from_slice(value.as_bytes());
                out.done = end;
            }
        }
    }
    for ((name, edit), written) in edits.iter().zip(written) {
        if let (Edit::Put(value), false) = (edit, written) {
            out.add(name, value)?;
        }
    }
    out.finish()
}

/// The edited text as it grows.
struct Output<'a> {
    text: &'a str,
    bytes: BytesMut,
    /// How far `text` has been dealt with.
    done: usize,
    /// Whether a member was met, and whether one was kept.
    met: bool,
    kept: bool,
}

impl<'a> Output<'a> {
    /// `text` is the end of `body`; what stands before it is kept.
    fn new(body: &'a [u8], text: &'a str, edits: &[(&str, Edit<'_>)]) -> Self {
        let more = |(name, edit): &(&str, Edit<'_>)| match edit {
            Edit::Replace(value) | Edit::Put(value) => name.len() + value.len() + 4,
            Edit::Drop => 0,
        };
        let mut bytes = BytesMut::with_capacity(body.len() + edits.iter().map(more).sum::<usize>());
        bytes.extend_from_slice(body.get(..body.len() - text.len()).unwrap_or_default());
        Self { text, bytes, done: 0, met: false, kept: false }
    }

    fn copy(&mut self, from: usize, to: usize) -> Option<()> {
        self.bytes.extend_from_slice(self.text.get(from..to)?.as_bytes());
        Some(())
    }

    /// Keeps `start..end` of a member that starts there.
    fn keep(&mut self, start: usize, end: usize) -> Option<()> {
        let gap = if self.met && !self.kept { start } else { self.done };
        self.copy(gap, end)?;
        (self.met, self.kept, self.done) = (true, true, end);
        Some(())
    }

    fn drop(&mut self, start: usize, end: usize) -> Option<()> {
        if !self.met {
            self.copy(self.done, start)?;
        }
        (self.met, self.done) = (true, end);
        Some(())
    }

    /// Adds a member after the last one.
    fn add(&mut self, name: &str, value: &str) -> Option<()> {
        if !self.met {
            let brace = self.text.find('{')? + 1;
            self.copy(self.done, brace)?;
            self.done = brace;
        }
        let comma = if self.kept { "," } else { "" };
        for part in [comma, "\"", name, "\":", value] {
            self.bytes.extend_from_slice(part.as_bytes());
        }
        (self.met, self.kept) = (true, true);
        Some(())
    }

    fn finish(mut self) -> Option<Bytes> {
        self.copy(self.done, self.text.len())?;
        Some(self.bytes.freeze())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;

    fn spliced(body: &str, edits: &[(&str, Edit<'_>)]) -> Option<String> {
        let bytes = splice(&Bytes::copy_from_slice(body.as_bytes()), edits)?;
        Some(String::from_utf8(bytes.to_vec()).unwrap())
    }

    const EDITS: [(&str, Edit<'_>); 3] =
        [("r", Edit::Replace("7")), ("p", Edit::Put("null")), ("d", Edit::Drop)];

    #[test]
    fn the_rest_stays() {
        for (body, want) in [
            ("{}", r#"{"p":null}"#),
            (" { } \n", " {\"p\":null } \n"),
            (r#"{"d":1}"#, r#"{"p":null}"#),
            (r#"{ "d": 1 , "d":2 }"#, r#"{ "p":null }"#),
            (r#"{ "d": 1 , "a" : 1.0 }"#, r#"{ "a" : 1.0,"p":null }"#),
            (r#"{ "a" : 1.0 , "d": 1 }"#, r#"{ "a" : 1.0,"p":null }"#),
            (
                r#"{"a":1, "d": [{"r":1}], "r" : [ ], "p": {"d":1}, "x":{"r":1,"p":2,"d":3}}"#,
                r#"{"a":1, "r" : 7, "p": null, "x":{"r":1,"p":2,"d":3}}"#,
            ),
            (r#"{"\u0064":1,"\u0072":1,"r":2,"\u0070":3}"#, r#"{"\u0072":7,"\u0070":null}"#),
            ("\u{feff}{\"a\":NaN}", "\u{feff}{\"a\":NaN,\"p\":null}"),
            (r#"{"\ud800":1,"a":"\ud800"}"#, r#"{"\ud800":1,"a":"\ud800","p":null}"#),
        ] {
            assert_eq!(spliced(body, &EDITS).as_deref(), Some(want), "{body}");
        }
    }

    #[test]
    fn what_is_no_object_is_not_edited() {
        for body in ["", "[]", "1", "{", "{\"a\":1", "{\"a\":1}x", "{\"a\" 1}", "{a:1}"] {
            assert_eq!(spliced(body, &EDITS), None, "{body}");
        }
        assert_eq!(splice(&Bytes::from_static(b"{\"a\":\"\xff\"}"), &EDITS), None);
        assert_eq!(splice(&Bytes::from_static(b"{\0\"a\0\"\0:\x001\0}\0"), &EDITS), None);
    }

    /// A member as written: the key's text, and the value's.
    fn member() -> impl Strategy<Value = (String, String, String)> {
        let key = prop_oneof![
            3 => prop::sample::select(vec!["r", "p", "d", "rr", "D", ""]).prop_map(str::to_owned),
            1 => any::<String>(),
        ];
        let written = (key, any::<bool>()).prop_map(|(key, escaped)| {
            let escape = |c: char| format!("\\u{:04x}", u32::from(c));
            let plain = serde_json::to_string(&key).unwrap();
            if escaped && key.is_ascii() {
                format!("\"{}\"", key.chars().map(escape).collect::<String>())
            } else {
                plain
            }
        });
        let leaf = prop_oneof![
            any::<i64>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
            any::<bool>().prop_map(Value::from),
            Just(serde_json::json!({ "r": [1, { "p": "}{\"" }], "d": null })),
        ];
        (written, leaf.prop_map(|value| value.to_string()), "[ \n\t\r]{0,2}")
    }

    proptest! {
        /// Against the members as a list of texts; and what a strict reader finds is the edited tree.
        #[test]
        fn agrees_with_a_list_of_members(members in prop::collection::vec(member(), 0..8), space in "[ \n]{0,2}") {
            let name = |key: &str| serde_json::from_str::<String>(key).unwrap();
            let write = |members: &[(String, String, String)]| {
                let all: Vec<_> = members.iter().map(|(key, value, gap)| format!("{key}{gap}:{gap}{value}")).collect();
                format!("{space}{{{}}}{space}", all.join(","))
            };
            let mut edited = members.clone();
            edited.retain(|(key, ..)| name(key) != "d");
            for (edit, new) in [("r", "7"), ("p", "null")] {
                let mut first = true;
                edited.retain(|(key, ..)| name(key) != edit || std::mem::take(&mut first));
                let written = edited.iter_mut().filter(|(key, ..)| name(key) == edit);
                written.for_each(|(_, value, _)| *value = new.into());
            }
            if edited.iter().all(|(key, ..)| name(key) != "p") {
                edited.push(("\"p\"".into(), "null".into(), String::new()));
            }
            let ours = spliced(&write(&members), &EDITS).unwrap();
            prop_assert_eq!(&ours, &write(&edited));

            let mut tree: serde_json::Map<String, Value> = serde_json::from_str(&write(&members)).unwrap();
            tree.remove("d");
            if let Some(value) = tree.get_mut("r") {
                *value = 7.into();
            }
            tree.insert("p".into(), Value::Null);
            prop_assert_eq!(serde_json::from_str::<serde_json::Map<String, Value>>(&ours).unwrap(), tree);
        }

        #[test]
        fn never_panics(body in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = splice(&body.into(), &EDITS);
        }

        /// Whatever comes out for near JSON: had it been JSON, it still is.
        #[test]
        fn json_stays_json(body in "\\{[\\[\\]{}:,\"\\\\rpd0-9eE+. \\n]{0,24}\\}") {
            let ours = spliced(&body, &EDITS);
            if serde_json::from_str::<Value>(&body).is_ok() {
                prop_assert!(serde_json::from_str::<Value>(&ours.unwrap()).is_ok());
            }
        }
    }
}
