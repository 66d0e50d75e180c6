//! Objects and arrays, member by member, without a tree.

use std::borrow::Cow;

use super::JsonError;
use super::reader::Reader;

/// One member of an object: the key, unescaped (`None`: it holds a lone surrogate), and its value as written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member<'a> {
    /// The key.
    pub key: Option<Cow<'a, str>>,
    /// The value's text, without surrounding white space. Nested values are checked for balance only.
    pub value: &'a str,
    /// Where the key's quote stands in the text given to [`Members::new`], in bytes.
    pub start: usize,
    /// Where `value` begins in that text, in bytes.
    pub at: usize,
}

/// A text and where in its one object or array the walk is.
struct Walk<'a> {
    reader: Reader<'a>,
    state: State,
}

#[derive(PartialEq)]
enum State {
    Start,
    Inside,
    Done,
}

impl<'a> Walk<'a> {
    fn new(text: &'a str) -> Self {
        Self { reader: Reader::new(text), state: State::Start }
    }

    /// What `read` makes of the next thing between these brackets.
    fn next<T>(
        &mut self,
        brackets: [u8; 2],
        read: impl FnOnce(&mut Reader<'a>) -> Result<T, JsonError>,
    ) -> Option<Result<T, JsonError>> {
        if self.state == State::Done {
            return None;
        }
        let next = match self.step(brackets) {
            Ok(true) => read(&mut self.reader).map(Some),
            Ok(false) => Ok(None),
            Err(e) => Err(e),
        };
        if !matches!(next, Ok(Some(_))) {
            self.state = State::Done;
        }
        next.transpose()
    }

    fn step(&mut self, [open, close]: [u8; 2]) -> Result<bool, JsonError> {
        let first = std::mem::replace(&mut self.state, State::Inside) == State::Start;
        if first {
            self.reader.space();
            self.reader.require(open)?;
        }
        if self.reader.more(first, close)? {
            return Ok(true);
        }
        self.reader.space();
        if self.reader.at == self.reader.text.len() { Ok(false) } else { Err(JsonError::Syntax) }
    }
}

/// A value as written, and where it begins.
fn raw<'a>(reader: &mut Reader<'a>) -> Result<(&'a str, usize), JsonError> {
    let at = reader.at;
    reader.skip()?;
    reader.text.get(at..reader.at).map(|value| (value, at)).ok_or(JsonError::Syntax)
}

/// The members of one object, in order. Ends with an error where the text is not an object.
pub struct Members<'a>(Walk<'a>);

impl<'a> Members<'a> {
    /// Walks the object that `text` holds; white space around it is allowed, anything else is an error.
    pub fn new(text: &'a str) -> Self {
        Self(Walk::new(text))
    }
}

impl<'a> Iterator for Members<'a> {
    type Item = Result<Member<'a>, JsonError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next(*b"{}", |reader| {
            let start = reader.at;
            let key = reader.key()?;
            let (value, at) = raw(reader)?;
            Ok(Member { key, value, start, at })
        })
    }
}

/// The items of one array as written, in order. Ends with an error where the text is not an array.
pub struct Items<'a>(Walk<'a>);

impl<'a> Items<'a> {
    /// Walks the array that `text` holds; white space around it is allowed, anything else is an error.
    pub fn new(text: &'a str) -> Self {
        Self(Walk::new(text))
    }
}

impl<'a> Iterator for Items<'a> {
    type Item = Result<&'a str, JsonError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next(*b"[]", |reader| raw(reader).map(|(item, _)| item))
    }
}
