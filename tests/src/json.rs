//! Bodies that test how JSON is read: what the grammar of RFC 8259 takes, what it refuses, and what it leaves to the
//! reader. In the spirit of JSONTestSuite (Seriot, "Parsing JSON is a Minefield"), with cases of our own, and beside
//! them heavy ones: deep, wide, and long.

use std::collections::BTreeSet;

/// What the grammar says of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It is JSON: every reader takes it.
    Valid,
    /// It is not.
    Invalid,
    /// Readers differ, or may: sizes, depths, encodings, surrogates.
    Either,
}

use Kind::{Either, Invalid, Valid};

/// A text.
#[derive(Clone, Debug)]
pub struct JsonCase {
    /// Unique.
    pub name: String,
    /// What the grammar says of it.
    pub kind: Kind,
    /// The text, not always UTF-8.
    pub text: Vec<u8>,
}

impl JsonCase {
    fn new(name: impl Into<String>, kind: Kind, text: impl Into<Vec<u8>>) -> Self {
        Self { name: name.into(), kind, text: text.into() }
    }

    /// As the value of a member of a completion request that is otherwise in order.
    pub fn in_request(&self, model: &str) -> Vec<u8> {
        let head = format!(r#"{{"model":"{model}","prompt":"one two three","max_tokens":1,"odd":"#);
        [head.as_bytes(), &self.text, b"}"].concat()
    }
}

/// Single values: each is a case alone, in an array, and as a member.
const VALUES: &[(Kind, &[&[u8]])] = &[
    (
        Valid,
        &[
            b"null",
            b"true",
            b"false",
            b"0",
            b"-0",
            b"1",
            b"-1",
            b"10",
            b"1234567890",
            b"0.0",
            b"-0.0",
            b"0.5",
            b"1.5",
            b"123.456",
            b"1e1",
            b"1E1",
            b"1e+1",
            b"1e-1",
            b"1.0e10",
            b"-1.25E-7",
            b"0e0",
            b"0E-0",
            b"1e07",
            b"5e-324",
            b"1.7976931348623157e308",
            b"9007199254740993",
            b"18446744073709551615",
            b"-9223372036854775808",
            b"\"\"",
            b"\" \"",
            b"\"a\"",
            b"\"\\\"\"",
            b"\"\\\\\"",
            b"\"\\/\"",
            b"\"\\b\\f\\n\\r\\t\"",
            b"\"\\u0041\"",
            b"\"\\u00e9\"",
            b"\"\\u0000\"",
            b"\"a\\u0000b\"",
            b"\"\\u001f\"",
            b"\"\\ud83d\\ude00\"",
            b"\"\\uD834\\uDD1E\"",
            b"\"\\u2028\\u2029\"",
            b"\"\\uffff\"",
            b"\"\\ufdd0\"",
            b"\"\xc3\xa9\"",
            b"\"\xe2\x82\xac\"",
            b"\"\xf0\x9f\x98\x80\"",
            b"\"\xf4\x8f\xbf\xbf\"",
            b"\"\xef\xbb\xbf\"",
            b"\"\xe2\x80\xa8\"",
            b"\"\x7f\"",
            b"\"\xc2\x80\"",
            b"\"/* none */\"",
            b"\"[{\"",
            b"\"\\\\u0041\"",
            b"[]",
            b"[ ]",
            b"[[]]",
            b"[null]",
            b"[1,2]",
            b"[1 , 2]",
            b"[\"\",0,{}]",
            b"[\n1\n]",
            b"[\t1\t]",
            b"[\r1\r]",
            b"{}",
            b"{ }",
            b"{\"a\":1}",
            b"{\"a\" : 1}",
            b"{\"\":0}",
            b"{\"a\":{}}",
            b"{\"a\":[]}",
            b"{\"a\":1,\"b\":2}",
            b"{\"\\u0061\":1}",
            b"{\"a\\u0000\":1}",
            b"{\"\xe2\x82\xac\":1}",
            b"{\n\"a\"\n:\n1\n}",
            b"{\"__proto__\":1}",
            b"{\"a\":null,\"A\":null}",
        ],
    ),
    (
        Invalid,
        &[
            b"nul",
            b"NULL",
            b"Null",
            b"nulll",
            b"tru",
            b"True",
            b"TRUE",
            b"fals",
            b"False",
            b"undefined",
            b"None",
            b"nan",
            b"inf",
            b"+Infinity",
            b"Inf",
            b"+1",
            b"++1",
            b"+-1",
            b"--1",
            b"-",
            b"- 1",
            b"-a",
            b".5",
            b"-.5",
            b"1.",
            b"1.e1",
            b"0.e1",
            b"1.5.5",
            b"1e",
            b"1e+",
            b"1E-",
            b"1ee1",
            b"1e1.5",
            b"1e1e1",
            b"01",
            b"-01",
            b"00",
            b"012.5",
            b"0x1",
            b"0xFF",
            b"0b1",
            b"0o7",
            b"1_000",
            b"1 000",
            b"1f",
            b"1n",
            b"1a",
            b"\xef\xbc\x91",
            b"\xd9\xa1",
            b"'a'",
            b"`a`",
            b"a",
            b"\"",
            b"\"a",
            b"a\"",
            b"\"\\\"",
            b"\"\\",
            b"\"\\x41\"",
            b"\"\\a\"",
            b"\"\\v\"",
            b"\"\\0\"",
            b"\"\\'\"",
            b"\"\\ \"",
            b"\"\\u\"",
            b"\"\\u0\"",
            b"\"\\u00\"",
            b"\"\\u004\"",
            b"\"\\u004g\"",
            b"\"\\U0041\"",
            b"\"\\u{41}\"",
            b"\"\\u+041\"",
            b"\"\\u 041\"",
            b"\"\n\"",
            b"\"\t\"",
            b"\"\r\"",
            b"\"\x00\"",
            b"\"\x1f\"",
            b"\"a\x00b\"",
            b"\"\"\"\"",
            b"\"a\"\"b\"",
            b"\"a\" \"b\"",
            b"[",
            b"]",
            b"[1",
            b"1]",
            b"[1,",
            b"[,",
            b"[,]",
            b"[,1]",
            b"[1,]",
            b"[1,,2]",
            b"[1,,]",
            b"[1 2]",
            b"[1;2]",
            b"[1:2]",
            b"[1}",
            b"[[]",
            b"[]]",
            b"[\"a\"",
            b"[\"a]",
            b"{",
            b"}",
            b"{]",
            b"{a:1}",
            b"{'a':1}",
            b"{1:1}",
            b"{null:1}",
            b"{[]:1}",
            b"{\"a\"}",
            b"{\"a\":}",
            b"{\"a\":1",
            b"{\"a\":1,",
            b"{\"a\":1,}",
            b"{,\"a\":1}",
            b"{\"a\":1,,}",
            b"{\"a\":1,,\"b\":2}",
            b"{\"a\" 1}",
            b"{\"a\",1}",
            b"{\"a\"::1}",
            b"{\"a\":1 \"b\":2}",
            b"{\"a\":1;\"b\":2}",
            b"{\"a\"=1}",
            b"{\"a\":1]",
            b"{\"a\":1}}",
            b"{\"a\":\"b}",
            b"{:1}",
            b"{\"a\":1:2}",
            b"{{}}",
            b"//a\n1",
            b"/*a*/1",
            b"#a\n1",
            b"1//a",
            b"<null>",
            b"(1)",
            b"[\x0b1]",
            b"[\x0c1]",
            b"[\xc2\xa01]",
            b"[\xe2\x80\xa81]",
            b"[\x001]",
            b"[1\x00]",
            b"\\u0031",
            b"*",
            b"[...]",
            b"$",
            b"\x1b",
            b"\x00",
        ],
    ),
    (
        Either,
        &[
            b"NaN",
            b"Infinity",
            b"-Infinity",
            b"1e999",
            b"-1e999",
            b"1e-999",
            b"0.4e0066999999999",
            b"1e99999999999999",
            b"123456789012345678901234567890",
            b"-123456789012345678901234567890",
            b"\"\\ud800\"",
            b"\"\\udc00\"",
            b"\"\\ud800a\"",
            b"\"\\ud800\\n\"",
            b"\"\\ud800\\u0041\"",
            b"\"\\ud800\\ud800\\udc00\"",
            b"\"\\udc00\\ud800\"",
            b"\"\xff\"",
            b"\"\x80\"",
            b"\"\xc3\"",
            b"\"\xc3(\"",
            b"\"\xe2\x82\"",
            b"\"\xc0\xaf\"",
            b"\"\xc1\xbf\"",
            b"\"\xe0\x80\x80\"",
            b"\"\xed\xa0\x80\"",
            b"\"\xed\xbf\xbf\"",
            b"\"\xf0\x80\x80\x80\"",
            b"\"\xf4\x90\x80\x80\"",
            b"\"\xf8\x88\x80\x80\x80\"",
            b"\"\xfe\"",
            b"{\"a\":1,\"a\":2}",
            b"{\"a\":1,\"\\u0061\":2}",
            b"{\"\":1,\"\":2}",
            b"{\"\\ud800\":1}",
            b"{\"\xff\":1}",
            b"\xff",
            b"[\xff]",
            b"[1,\xc3]",
            b"\xe9",
        ],
    ),
];

/// Whole texts: white space, several values, byte order marks, other encodings, and requests with odd fields.
const TEXTS: &[(Kind, &str, &[u8])] = &[
    (Invalid, "empty", b""),
    (Invalid, "space only", b" "),
    (Invalid, "line ends only", b"\r\n\r\n"),
    (Invalid, "NUL only", b"\x00"),
    (Valid, "space around", b" \t\r\n{} \t\r\n"),
    (Invalid, "form feed before", b"\x0c{}"),
    (Invalid, "no-break space before", b"\xc2\xa0{}"),
    (Invalid, "word joiner before", b"\xe2\x81\xa0{}"),
    (Invalid, "two values", b"{}{}"),
    (Invalid, "two values on lines", b"{}\n{}"),
    (Invalid, "a comma behind", b"{},"),
    (Invalid, "a NUL behind", b"{}\x00"),
    (Invalid, "half a body twice", br#"{"model":"a","prompt":"b"}{"model":"c"}"#),
    (Either, "BOM alone", b"\xef\xbb\xbf"),
    (Either, "BOM before", b"\xef\xbb\xbf{\"model\":\"m\",\"prompt\":\"p\"}"),
    (Either, "BOM twice", b"\xef\xbb\xbf\xef\xbb\xbf{}"),
    (Invalid, "half a BOM", b"\xef\xbb{}"),
    (Either, "UTF-16 LE with BOM", b"\xff\xfe{\x00}\x00"),
    (Either, "UTF-16 BE with BOM", b"\xfe\xff\x00{\x00}"),
    (Either, "UTF-16 LE", b"{\x00}\x00"),
    (Either, "UTF-32 LE", b"\xff\xfe\x00\x00{\x00\x00\x00}\x00\x00\x00"),
    (Invalid, "a form", b"model=m&prompt=p"),
    (Invalid, "XML", b"<?xml version=\"1.0\"?><a/>"),
    (Invalid, "YAML", b"model: m\nprompt: p\n"),
    (Invalid, "a gzip head", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03"),
    (Invalid, "an HTTP head", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nabcde"),
    (Valid, "a chunked end", b"0\r\n\r\n"),
    (Valid, "model null", br#"{"model":null,"prompt":"p"}"#),
    (Valid, "model number", br#"{"model":7,"prompt":"p"}"#),
    (Valid, "model list", br#"{"model":["m"],"prompt":"p"}"#),
    (Valid, "model empty", br#"{"model":"","prompt":"p"}"#),
    (Valid, "model absent", br#"{"prompt":"p"}"#),
    (Valid, "model with NUL", br#"{"model":"m\u0000","prompt":"p"}"#),
    (Valid, "model one level up", br#"{"model":"..","prompt":"p"}"#),
    (Valid, "model here", br#"{"model":".","prompt":"p"}"#),
    (Valid, "model outside", br#"{"model":"../../etc/passwd","prompt":"p"}"#),
    (Valid, "model absolute", br#"{"model":"/etc/passwd","prompt":"p"}"#),
    (Valid, "model percent", br#"{"model":"%2e%2e%2fa","prompt":"p"}"#),
    (Valid, "model with line ends", br#"{"model":"m\r\nX-Evil: 1","prompt":"p"}"#),
    (Either, "model lone surrogate", br#"{"model":"\ud800","prompt":"p"}"#),
    (Either, "model invalid UTF-8", b"{\"model\":\"m\xff\",\"prompt\":\"p\"}"),
    (Either, "model twice", br#"{"model":"a","model":"b","prompt":"p"}"#),
    (Either, "model escaped twice", br#"{"model":"a","\u006dodel":"b","prompt":"p"}"#),
    (Valid, "model within", br#"{"a":{"model":"x"},"model":"m","prompt":"p"}"#),
    (Invalid, "model then cut", br#"{"model":"m","prompt":"p"#),
    (Invalid, "model then NaN without end", br#"{"model":"m","prompt":NaN"#),
    (Either, "max_tokens NaN", br#"{"model":"m","prompt":"p","max_tokens":NaN}"#),
    (Either, "temperature huge", br#"{"model":"m","prompt":"p","temperature":1e999}"#),
    (Either, "prompt twice", br#"{"model":"m","prompt":"a","prompt":"b"}"#),
    (Either, "prompt lone surrogate", br#"{"model":"m","prompt":"\udfff"}"#),
    (Valid, "prompt null", br#"{"model":"m","prompt":null}"#),
    (Valid, "prompt object", br#"{"model":"m","prompt":{"a":1}}"#),
    (Valid, "prompt of lists", br#"{"model":"m","prompt":[[1,2],[3]]}"#),
    (Valid, "prompt of mixed kinds", br#"{"model":"m","prompt":[1,"a",null]}"#),
    (Valid, "prompt of negative ids", br#"{"model":"m","prompt":[-1,4294967296,1.5]}"#),
    (Valid, "messages null", br#"{"model":"m","messages":null}"#),
    (Valid, "messages empty", br#"{"model":"m","messages":[]}"#),
    (Valid, "messages of numbers", br#"{"model":"m","messages":[1,2]}"#),
    (Valid, "message without role", br#"{"model":"m","messages":[{"content":"a"}]}"#),
    (Valid, "content object", br#"{"model":"m","messages":[{"role":"user","content":{}}]}"#),
    (Valid, "stream as text", br#"{"model":"m","prompt":"p","stream":"true"}"#),
    (Valid, "an array for a request", br#"[{"model":"m","prompt":"p"}]"#),
    (Valid, "a string for a request", br#""{\"model\":\"m\"}""#),
];

/// More than 318 small cases, each name once and each text once.
pub fn json_cases() -> Vec<JsonCase> {
    let mut cases: Vec<_> =
        TEXTS.iter().map(|(kind, name, text)| JsonCase::new(*name, *kind, *text)).collect();
    let values = VALUES.iter().flat_map(|(kind, values)| values.iter().map(|value| (*kind, *value)));
    for (kind, value) in values {
        let shown = value.escape_ascii();
        cases.push(JsonCase::new(format!("alone {shown}"), kind, value));
        cases.push(JsonCase::new(format!("in a list {shown}"), kind, [b"[0,", value, b"]"].concat()));
        let member = [br#"{"model":"m","prompt":"p","odd":"#, value, b"}"].concat();
        cases.push(JsonCase::new(format!("in a member {shown}"), kind, member));
    }
    let mut seen = BTreeSet::new();
    cases.retain(|case| seen.insert(case.text.clone()));
    cases
}

/// The deepest case, in levels.
pub const DEPTH: usize = 100_000;

/// The most members of one object.
pub const KEYS: usize = 1_000_000;

/// Few and heavy cases, up to 16 MB: what a reader that recurses, is quadratic, or builds trees falls over.
pub fn heavy_json_cases() -> Vec<JsonCase> {
    let request = |member: &str| format!(r#"{{"model":"m","prompt":"p","odd":{member}}}"#);
    let members = |name: &dyn Fn(usize) -> String| {
        let list: Vec<_> = (0..KEYS).map(|n| format!("\"{}\":0", name(n))).collect();
        format!("{{{},\"model\":\"m\",\"prompt\":\"p\"}}", list.join(","))
    };
    let lists = "[".repeat(DEPTH) + &"]".repeat(DEPTH);
    let objects = "{\"a\":".repeat(DEPTH) + "0" + &"}".repeat(DEPTH);
    let mixed = "[{\"a\":".repeat(DEPTH / 2) + "0" + &"}]".repeat(DEPTH / 2);
    let long = |unit: &str, bytes: usize| unit.repeat(bytes / unit.len());
    let named = |model: String| format!(r#"{{"model":"{model}","prompt":"p"}}"#);
    let asked = |prompt: String| format!(r#"{{"model":"m","prompt":{prompt}}}"#);
    vec![
        JsonCase::new("deep lists", Either, request(&lists)),
        JsonCase::new("deep objects", Either, request(&objects)),
        JsonCase::new("deep in turn", Either, request(&mixed)),
        JsonCase::new("deep lists alone", Either, lists),
        JsonCase::new("deep and never closed", Invalid, "[".repeat(DEPTH)),
        JsonCase::new("deep objects never closed", Invalid, "{\"a\":".repeat(DEPTH)),
        JsonCase::new("deep prompt", Either, asked("[".repeat(DEPTH) + &"]".repeat(DEPTH))),
        JsonCase::new("closed and never opened", Invalid, "]".repeat(DEPTH)),
        JsonCase::new("many keys", Valid, members(&|n| format!("k{n}"))),
        JsonCase::new("many equal keys", Either, members(&|_| "k".into())),
        JsonCase::new("many models", Either, members(&|_| "model".into())),
        JsonCase::new("many escaped keys", Valid, members(&|n| format!("\\n{n}"))),
        JsonCase::new("many values", Valid, request(&format!("[{}0]", "0,".repeat(KEYS)))),
        JsonCase::new("many empty lists", Valid, request(&format!("[{}0]", "[],".repeat(KEYS)))),
        JsonCase::new("a long model", Valid, named(long("m", 1 << 20))),
        JsonCase::new("a long escaped model", Valid, named(long("\\u006d", 1 << 20))),
        JsonCase::new("a long path for a model", Valid, named(long("../", 1 << 20))),
        JsonCase::new("a long key", Valid, request(&format!("{{\"{}\":0}}", long("k", 1 << 20)))),
        JsonCase::new("a long number", Either, request(&long("9", 1 << 20))),
        JsonCase::new("a long fraction", Either, request(&format!("0.{}", long("3", 1 << 20)))),
        JsonCase::new("a long exponent", Either, request(&format!("1e{}", long("9", 1 << 16)))),
        JsonCase::new("long white space", Valid, request(&format!("{}0", long(" ", 1 << 20)))),
        JsonCase::new(
            "a long prompt",
            Valid,
            asked(format!("\"{}\"", long("the block was known ", 4 << 20))),
        ),
        JsonCase::new("a long prompt of escapes", Valid, asked(format!("\"{}\"", long("\\n", 4 << 20)))),
        JsonCase::new(
            "a long prompt without an end",
            Invalid,
            format!("{{\"model\":\"m\",\"prompt\":\"{}", long("a", 4 << 20)),
        ),
        JsonCase::new("many token ids", Valid, asked(format!("[{}7]", "7,".repeat(KEYS)))),
        JsonCase::new(
            "many backslashes",
            Invalid,
            format!("{{\"model\":\"m\",\"prompt\":\"{}", long("\\", 1 << 20)),
        ),
        JsonCase::new("many quotes", Invalid, long("\"", 1 << 20)),
        JsonCase::new("many colons", Invalid, format!("{{\"a\"{}", long(":", 1 << 20))),
        JsonCase::new(
            "long invalid UTF-8",
            Either,
            [br#"{"model":"m","prompt":""#.as_slice(), &vec![0xff; 1 << 20], b"\"}"].concat(),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cases_are_what_they_are_said_to_be() {
        let cases = json_cases();
        assert!(cases.len() > 318, "{} cases", cases.len());
        let names: BTreeSet<_> = cases.iter().map(|c| &c.name).collect();
        assert_eq!(names.len(), cases.len(), "names that are taken twice");
        let strict = |text: &[u8]| serde_json::from_slice::<serde_json::Value>(text).is_ok();
        let wrong: Vec<_> = cases
            .iter()
            .filter(|case| match case.kind {
                Valid => !strict(&case.text),
                Invalid => strict(&case.text),
                Either => false,
            })
            .map(|case| (&case.name, case.kind))
            .collect();
        assert!(wrong.is_empty(), "{wrong:#?}");
        for kind in [Valid, Invalid, Either] {
            assert!(cases.iter().filter(|case| case.kind == kind).count() > 50, "few of {kind:?}");
        }
    }

    #[test]
    fn heavy_cases_are_heavy() {
        let cases = heavy_json_cases();
        assert!(cases.len() >= 24 && cases.iter().all(|case| case.text.len() > 50_000));
        assert!(cases.iter().all(|case| case.text.len() < 16 << 20), "they pass the usual limit of a body");
    }
}
