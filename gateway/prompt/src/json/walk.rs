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

/// The members of one object, in order. Ends with an error where the text is not an object.
pub struct Members<'a> {
    reader: Reader<'a>,
    state: State,
}

#[derive(PartialEq)]
enum State {
    Start,
    Inside,
    Done,
}

impl<'a> Members<'a> {
    /// Walks the object that `text` holds; white space around it is allowed, anything else is an error.
    pub fn new(text: &'a str) -> Self {
        Self { reader: Reader::new(text), state: State::Start }
    }

    fn step(&mut self) -> Result<Option<Member<'a>>, JsonError> {
        let reader = &mut self.reader;
        reader.space();
        match (&self.state, reader.peek()) {
            (State::Start, Some(b'{')) => {
                reader.at += 1;
                reader.space();
                if reader.peek() == Some(b'}') {
                    return self.finish();
                }
            }
            (State::Inside, Some(b',')) => {
                reader.at += 1;
                reader.space();
            }
            (State::Inside, Some(b'}')) => return self.finish(),
            _ => return Err(JsonError::Syntax),
        }
        self.state = State::Inside;
        let start = reader.at;
        let key = match reader.string() {
            Ok(key) => Some(key),
            Err(JsonError::Surrogate) => None,
            Err(e) => return Err(e),
        };
        reader.space();
        reader.require(b':')?;
        reader.space();
        let at = reader.at;
        reader.skip()?;
        let value = reader.text.get(at..reader.at).ok_or(JsonError::Syntax)?;
        Ok(Some(Member { key, value, start, at }))
    }

    fn finish(&mut self) -> Result<Option<Member<'a>>, JsonError> {
        self.reader.at += 1;
        self.reader.space();
        self.state = State::Done;
        if self.reader.at == self.reader.text.len() { Ok(None) } else { Err(JsonError::Syntax) }
    }
}

impl<'a> Iterator for Members<'a> {
    type Item = Result<Member<'a>, JsonError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.state == State::Done {
            return None;
        }
        match self.step() {
            Ok(member) => member.map(Ok),
            Err(e) => {
                self.state = State::Done;
                Some(Err(e))
            }
        }
    }
}

/// The items of one array as written, in order. Ends with an error where the text is not an array.
pub struct Items<'a> {
    reader: Reader<'a>,
    state: State,
}

impl<'a> Items<'a> {
    /// Walks the array that `text` holds; white space around it is allowed, anything else is an error.
    pub fn new(text: &'a str) -> Self {
        Self { reader: Reader::new(text), state: State::Start }
    }

    fn step(&mut self) -> Result<Option<&'a str>, JsonError> {
        let reader = &mut self.reader;
        reader.space();
        match (&self.state, reader.peek()) {
            (State::Start, Some(b'[')) => {
                reader.at += 1;
                reader.space();
                if reader.peek() == Some(b']') {
                    return self.finish();
                }
            }
            (State::Inside, Some(b',')) => {
                reader.at += 1;
                reader.space();
            }
            (State::Inside, Some(b']')) => return self.finish(),
            _ => return Err(JsonError::Syntax),
        }
        self.state = State::Inside;
        let at = reader.at;
        reader.skip()?;
        reader.text.get(at..reader.at).map(Some).ok_or(JsonError::Syntax)
    }

    fn finish(&mut self) -> Result<Option<&'a str>, JsonError> {
        self.reader.at += 1;
        self.reader.space();
        self.state = State::Done;
        if self.reader.at == self.reader.text.len() { Ok(None) } else { Err(JsonError::Syntax) }
    }
}

impl<'a> Iterator for Items<'a> {
    type Item = Result<&'a str, JsonError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.state == State::Done {
            return None;
        }
        match self.step() {
            Ok(item) => item.map(Ok),
            Err(e) => {
                self.state = State::Done;
                Some(Err(e))
            }
        }
    }
}
