//! Where Jinja2's meaning of the source differs from minijinja's, the source is rewritten before it is compiled.
//!
//! | in the source | becomes | because in Python |
//! |---|---|---|
//! | `{% generation %}` | `{% if true %}` | the tag only marks what is trained on |
//! | `for x in e` | `for x in __iter(e)` | nothing iterates over `None` |
//! | `a ~ b` | `__str(a) ~ __str(b)` | values print as `str` prints them |
//! | `a < b` | `__ord(a) < __ord(b)` | undefined and `None` have no order |
//! | `'..' % e` | `__format('..', e)` | that is how strings are formatted |
//! | `a\|safe + b` | `a\|safe + __escape(b)` | markup escapes what it is joined with |
//! | `e.items` (no call) | `__member(e, 'items')` | a dict's methods hide its keys |
//! | `'\/'`, `'\a'` | `'\\/'`, `'\x07'` | string escapes are Python's |

use std::collections::HashSet;
use std::ops::Range;

use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;

/// Attributes that every dict has.
const DICT_MEMBERS: [&str; 11] =
    ["clear", "copy", "fromkeys", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values"];

/// How tightly an operator binds; the looser, the smaller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Binds {
    /// Commas, keywords, the ends of brackets and blocks.
    Never,
    Compare,
    Add,
    Concat,
    Multiply,
}

/// The source as minijinja should read it; what cannot be read at all comes back as it is, for the compiler to refuse.
pub(super) fn rewrite(source: &str, syntax: SyntaxConfig) -> String {
    with(source, syntax, |rewriter| rewriter.run())
}

/// The source without `generation` tags, and otherwise as it is.
pub(super) fn without_markers(source: &str, syntax: SyntaxConfig) -> String {
    with(source, syntax, |rewriter| {
        for i in 0..rewriter.tokens.len() {
            if matches!(rewriter.token(i), Some(Token::BlockStart)) {
                rewriter.marker(i + 1);
            }
        }
    })
}

fn with(source: &str, syntax: SyntaxConfig, run: impl FnOnce(&mut Rewriter<'_>)) -> String {
    let mut tokens = Vec::new();
    for token in tokenize(source, false, syntax) {
        let Ok((token, span)) = token else { return source.to_owned() };
        tokens.push((token, span.start_offset as usize..span.end_offset as usize));
    }
    let mut rewriter = Rewriter { tokens: &tokens, source, edits: Vec::new(), wrapped: HashSet::new() };
    run(&mut rewriter);
    rewriter.apply()
}

struct Rewriter<'s> {
    tokens: &'s [(Token<'s>, Range<usize>)],
    source: &'s str,
    edits: Vec<Edit>,
    wrapped: HashSet<(Range<usize>, &'static str)>,
}

/// Text to put in the place of a range, which may be empty.
struct Edit {
    at: Range<usize>,
    /// Several edits at one place: those that close come first, the innermost before the outer ones; those that open
    /// follow, the outermost first; what replaces the text itself comes last.
    order: (bool, usize, usize),
    text: String,
}

impl<'s> Rewriter<'s> {
    fn token(&self, i: usize) -> Option<&'s Token<'s>> {
        self.tokens.get(i).map(|(token, _)| token)
    }

    fn range(&self, i: usize) -> Range<usize> {
        self.tokens.get(i).map_or(0..0, |(_, range)| range.clone())
    }

    fn word(&self, i: usize) -> Option<&'s str> {
        match self.token(i) {
            Some(Token::Ident(word)) => Some(word),
            _ => None,
        }
    }

    fn replace(&mut self, i: usize, text: &str) {
        let last = (true, usize::MAX, usize::MAX);
        self.edits.push(Edit { at: self.range(i), order: last, text: text.to_owned() });
    }

    /// Puts `open` before the first of some tokens and `close` after the last, once.
    fn wrap(&mut self, tokens: Range<usize>, open: &'static str, close: &str) {
        let (start, end) = (self.range(tokens.start).start, self.range(tokens.end.saturating_sub(1)).end);
        if self.wrapped.insert((start..end, open)) {
            let later = usize::MAX - self.edits.len(); // of two around the same, the later one is the outer one
            let opens = (true, usize::MAX - end, later);
            self.edits.push(Edit { at: start..start, order: opens, text: open.to_owned() });
            self.edits.push(Edit {
                at: end..end,
                order: (false, usize::MAX - start, 0),
                text: close.to_owned(),
            });
        }
    }

    fn apply(mut self) -> String {
        self.edits.sort_by_key(|edit| (edit.at.start, edit.order));
        let mut out = String::with_capacity(self.source.len() * 2);
        let mut at = 0;
        for edit in &self.edits {
            out.push_str(self.source.get(at..edit.at.start).unwrap_or_default());
            out.push_str(&edit.text);
            at = edit.at.end;
        }
        out.push_str(self.source.get(at..).unwrap_or_default());
        out
    }

    fn run(&mut self) {
        for i in 0..self.tokens.len() {
            match self.token(i) {
                Some(Token::BlockStart) => {
                    self.marker(i + 1);
                    self.iteration(i + 1);
                }
                Some(Token::Tilde) => self.wrap_operands(i, Binds::Concat, "__str("),
                Some(Token::Lt | Token::Lte | Token::Gt | Token::Gte) => {
                    self.wrap_operands(i, Binds::Compare, "__ord(")
                }
                Some(Token::Mod) => self.format(i),
                Some(Token::Plus) => self.markup(i),
                Some(Token::Dot) => self.member(i),
                Some(Token::Str(_) | Token::String(_)) => self.literal(i),
                _ => (),
            }
        }
    }

    fn marker(&mut self, i: usize) {
        match self.word(i) {
            Some("generation") => self.replace(i, "if true"),
            Some("endgeneration") => self.replace(i, "endif"),
            _ => (),
        }
    }

    fn iteration(&mut self, i: usize) {
        if self.word(i) == Some("for") {
            let Some(start) = (i..self.tokens.len()).find(|j| self.word(*j) == Some("in")) else { return };
            let mut depth = 0_usize;
            for j in start + 1..self.tokens.len() {
                match self.token(j) {
                    Some(Token::ParenOpen | Token::BracketOpen | Token::BraceOpen) => depth += 1,
                    Some(Token::ParenClose | Token::BracketClose | Token::BraceClose) => {
                        depth = depth.saturating_sub(1)
                    }
                    Some(Token::Comma) if depth == 0 => return, // a tuple without parentheses
                    Some(Token::BlockEnd) => return self.wrap(start + 1..j, "__iter(", ")"),
                    Some(Token::Ident("if" | "recursive")) if depth == 0 => {
                        return self.wrap(start + 1..j, "__iter(", ")");
                    }
                    _ => (),
                }
            }
        }
    }

    /// How tightly the token binds what is around it; `None` if it is part of an operand. Brackets are not looked into.
    fn binds(&self, i: usize) -> Option<Binds> {
        let before = i.checked_sub(1).and_then(|i| self.token(i));
        Some(match self.token(i)? {
            Token::Ident(_) if matches!(before, Some(Token::Dot | Token::Pipe)) => return None,
            Token::Ident(_) if matches!(before, Some(Token::BlockStart)) => Binds::Never,
            Token::Ident(_) if self.is_test(i) => return None,
            Token::Ident("if" | "else" | "and" | "or" | "recursive") => Binds::Never,
            Token::Ident("not") if self.word(i + 1) == Some("in") => Binds::Compare,
            Token::Ident("not") => Binds::Never,
            Token::Ident("in") => Binds::Compare,
            Token::Eq | Token::Ne | Token::Lt | Token::Lte | Token::Gt | Token::Gte => Binds::Compare,
            Token::Plus | Token::Minus if self.is_operand_end(i) => Binds::Add,
            Token::Tilde => Binds::Concat,
            Token::Mul | Token::Div | Token::FloorDiv | Token::Mod | Token::Pow => Binds::Multiply,
            Token::Comma | Token::Colon | Token::Assign => Binds::Never,
            Token::BlockStart | Token::BlockEnd | Token::VariableStart | Token::VariableEnd => Binds::Never,
            _ => return None,
        })
    }

    /// Is the word at `i` the name of a test, or the `not` or `is` before one?
    fn is_test(&self, i: usize) -> bool {
        let before = |n: usize| i.checked_sub(n).and_then(|i| self.word(i));
        self.word(i) == Some("is")
            || before(1) == Some("is")
            || (before(1) == Some("not") && before(2) == Some("is"))
    }

    /// Does an operand end before `i`? Otherwise a sign there is a sign.
    fn is_operand_end(&self, i: usize) -> bool {
        let Some(before) = i.checked_sub(1) else { return false };
        match self.token(before) {
            Some(Token::ParenOpen | Token::BracketOpen | Token::BraceOpen) => false,
            _ => self.binds(before).is_none(),
        }
    }

    /// The operand before `i`, as far as operators bind tighter than `level`.
    fn operand_before(&self, i: usize, level: Binds) -> Range<usize> {
        let mut depth = 0_usize;
        let mut start = i;
        while let Some(j) = start.checked_sub(1) {
            match self.token(j) {
                Some(Token::ParenClose | Token::BracketClose | Token::BraceClose) => depth += 1,
                Some(Token::ParenOpen | Token::BracketOpen | Token::BraceOpen) if depth == 0 => break,
                Some(Token::ParenOpen | Token::BracketOpen | Token::BraceOpen) => depth -= 1,
                _ if depth == 0 && self.binds(j).is_some_and(|b| b <= level) => break,
                _ => (),
            }
            start = j;
        }
        start..i
    }

    /// The operand after `i`.
    fn operand_after(&self, i: usize, level: Binds) -> Range<usize> {
        let mut depth = 0_usize;
        let mut end = i + 1;
        while end < self.tokens.len() {
            match self.token(end) {
                Some(Token::ParenOpen | Token::BracketOpen | Token::BraceOpen) => depth += 1,
                Some(Token::ParenClose | Token::BracketClose | Token::BraceClose) if depth == 0 => break,
                Some(Token::ParenClose | Token::BracketClose | Token::BraceClose) => depth -= 1,
                _ if depth == 0 && self.binds(end).is_some_and(|b| b <= level) => break,
                _ => (),
            }
            end += 1;
        }
        i + 1..end
    }

    fn wrap_operands(&mut self, i: usize, level: Binds, open: &'static str) {
        for operand in [self.operand_before(i, level), self.operand_after(i, level)] {
            let literal = operand.len() == 1
                && matches!(self.token(operand.start), Some(Token::Str(_) | Token::String(_)));
            if !operand.is_empty() && !literal {
                self.wrap(operand, open, ")");
            }
        }
    }

    fn format(&mut self, i: usize) {
        let (left, right) = (self.operand_before(i, Binds::Multiply), self.operand_after(i, Binds::Multiply));
        if left.len() == 1 && matches!(self.token(left.start), Some(Token::Str(_) | Token::String(_))) {
            self.replace(i, ",");
            self.wrap(left.start..right.end, "__format(", ")");
        }
    }

    fn is_markup(&self, operand: &Range<usize>) -> bool {
        let last = operand.end.saturating_sub(1);
        matches!(self.word(last), Some("safe" | "e" | "escape" | "forceescape"))
            && matches!(last.checked_sub(1).and_then(|i| self.token(i)), Some(Token::Pipe))
    }

    /// Escapes the terms of a sum that holds markup; done once, at the sum's first sign.
    fn markup(&mut self, i: usize) {
        let mut terms = vec![self.operand_before(i, Binds::Add)];
        let first = terms.first().map_or(0, |t| t.start);
        if first.checked_sub(1).is_some_and(|i| matches!(self.token(i), Some(Token::Plus))) {
            return;
        }
        let mut sign = i;
        while matches!(self.token(sign), Some(Token::Plus)) {
            let term = self.operand_after(sign, Binds::Add);
            sign = term.end;
            terms.push(term);
        }
        if terms.iter().any(|term| self.is_markup(term)) {
            for term in terms {
                if !self.is_markup(&term) {
                    self.wrap(term, "__escape(", ")");
                }
            }
        }
    }

    fn member(&mut self, dot: usize) {
        let Some(name) = self.word(dot + 1).filter(|name| DICT_MEMBERS.contains(name)) else { return };
        if matches!(self.token(dot + 2), Some(Token::ParenOpen | Token::Assign)) {
            return; // a call, or an assignment to a namespace
        }
        if let Some(start) = self.primary_before(dot) {
            self.wrap(start..dot, "__member(", &format!(", '{name}')"));
            self.replace(dot, "");
            self.replace(dot + 1, "");
        }
    }

    /// Where the name, call or subscript that ends before `end` begins; `None` if it is something else, or filtered.
    fn primary_before(&self, end: usize) -> Option<usize> {
        let last = end.checked_sub(1)?;
        let start = match self.token(last)? {
            Token::Ident(_) => last,
            Token::ParenClose | Token::BracketClose => self.opening(last)?,
            _ => return None,
        };
        let Some(before) = start.checked_sub(1) else { return Some(start) };
        match (self.token(before)?, self.token(start)?) {
            (Token::Dot, _) => self.primary_before(before),
            (Token::Pipe, _) => None,
            // what is called or subscripted
            (_, Token::ParenOpen | Token::BracketOpen) if self.is_operand_end(start) => {
                self.primary_before(start)
            }
            _ => Some(start),
        }
    }

    /// The bracket that the one at `close` closes.
    fn opening(&self, close: usize) -> Option<usize> {
        let mut depth = 0_usize;
        for i in (0..=close).rev() {
            match self.token(i) {
                Some(Token::ParenClose | Token::BracketClose | Token::BraceClose) => depth += 1,
                Some(Token::ParenOpen | Token::BracketOpen | Token::BraceOpen) => depth -= 1,
                _ => (),
            }
            if depth == 0 {
                return Some(i);
            }
        }
        None
    }

    fn literal(&mut self, i: usize) {
        let text = self.source.get(self.range(i)).unwrap_or_default();
        let mut fixed = String::with_capacity(text.len() + 4);
        let mut chars = text.chars();
        while let Some(c) = chars.next() {
            let escaped = if c == '\\' { chars.next() } else { None };
            match (c, escaped) {
                ('\\', Some('/')) => fixed.push_str("\\\\/"),
                ('\\', Some('a')) => fixed.push_str("\\x07"),
                ('\\', Some('v')) => fixed.push_str("\\x0b"),
                (c, escaped) => fixed.extend([Some(c), escaped].into_iter().flatten()),
            }
        }
        if fixed != text {
            self.replace(i, &fixed);
        }
    }
}
