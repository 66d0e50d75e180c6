//! What a template's source says about it, as vLLM reads it (`renderers/hf.py`).

use minijinja::machinery::ast::{Expr, Stmt};
use minijinja::machinery::parse;
use minijinja::syntax::SyntaxConfig;

use super::rewrite;

/// How a template wants the content of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContentFormat {
    /// As one text.
    String,
    /// As a list of parts.
    OpenAi,
}

/// Does the template know the role `developer`?
pub(super) fn knows_developer(source: &str) -> bool {
    source.contains("\"developer\"") || source.contains("'developer'")
}

/// A template that loops over a message's content wants parts.
pub(super) fn content_format(source: &str, syntax: SyntaxConfig) -> ContentFormat {
    let source = rewrite::without_markers(source, syntax.clone());
    let Ok(root) = parse(&source, "chat", syntax) else { return ContentFormat::String };
    let mut found = Found::default();
    found.statement(&root);
    match found.loops_over_content() {
        Ok(true) => ContentFormat::OpenAi,
        Ok(false) | Err(Unnamed) => ContentFormat::String,
    }
}

/// vLLM gives up (and takes text) where what it follows is not given a plain name.
struct Unnamed;

/// All assignments and loops, in the order of the source.
#[derive(Default)]
struct Found<'a> {
    sets: Vec<(&'a Expr<'a>, &'a Expr<'a>)>,
    loops: Vec<(&'a Expr<'a>, &'a Expr<'a>)>,
}

impl<'a> Found<'a> {
    fn statements(&mut self, body: &'a [Stmt<'a>]) {
        body.iter().for_each(|statement| self.statement(statement));
    }

    fn statement(&mut self, statement: &'a Stmt<'a>) {
        match statement {
            Stmt::Template(t) => self.statements(&t.children),
            Stmt::ForLoop(f) => {
                self.loops.push((&f.target, &f.iter));
                self.statements(&f.body);
                self.statements(&f.else_body);
            }
            Stmt::IfCond(i) => {
                self.statements(&i.true_body);
                self.statements(&i.false_body);
            }
            Stmt::WithBlock(w) => self.statements(&w.body),
            Stmt::Set(s) => self.sets.push((&s.target, &s.expr)),
            Stmt::SetBlock(s) => self.statements(&s.body),
            Stmt::AutoEscape(a) => self.statements(&a.body),
            Stmt::FilterBlock(f) => self.statements(&f.body),
            Stmt::Block(b) => self.statements(&b.body),
            Stmt::Macro(m) => self.statements(&m.body),
            Stmt::CallBlock(c) => self.statements(&c.macro_decl.body),
            _ => (),
        }
    }

    /// Names that stand for the messages, or for a part of them.
    fn names_of_messages(&self) -> Result<Vec<&'a str>, Unnamed> {
        let mut names = vec!["messages"];
        let mut at = 0;
        while let Some(name) = names.get(at).copied() {
            for (target, expr) in &self.sets {
                if is_or_is_of(expr, name, None) {
                    let target = name_of(target)?;
                    if !names.contains(&target) {
                        names.push(target);
                    }
                }
            }
            at += 1;
        }
        Ok(names)
    }

    fn loops_over_content(&self) -> Result<bool, Unnamed> {
        let lists = self.names_of_messages()?;
        let mut messages = Vec::new();
        for (target, iter) in &self.loops {
            if lists.iter().any(|name| is_or_is_of(iter, name, None)) {
                messages.push(name_of(target)?);
            }
        }
        for (target, iter) in &self.loops {
            let of_message = messages.iter().any(|name| is_or_is_of(iter, name, Some("content")));
            if of_message || matches!(iter, Expr::Var(v) if v.id == "content") {
                return name_of(target).map(|_| true);
            }
        }
        Ok(false)
    }
}

fn name_of<'a>(expr: &Expr<'a>) -> Result<&'a str, Unnamed> {
    match expr {
        Expr::Var(v) => Ok(v.id),
        _ => Err(Unnamed),
    }
}

/// Is this the variable `name` (or its member `key`), as it is, filtered, tested or sliced?
fn is_or_is_of(expr: &Expr<'_>, name: &str, key: Option<&str>) -> bool {
    match (expr, key) {
        (Expr::Filter(f), _) => f.expr.as_ref().is_some_and(|inner| is_or_is_of(inner, name, key)),
        (Expr::Test(t), _) => is_or_is_of(&t.expr, name, key),
        (Expr::Slice(s), _) => is_or_is_of(&s.expr, name, key),
        (Expr::GetItem(g), Some(key)) => {
            matches!(&g.expr, Expr::Var(v) if v.id == name)
                && matches!(&g.subscript_expr, Expr::Const(c) if c.value.as_str() == Some(key))
        }
        (Expr::GetAttr(g), Some(key)) => matches!(&g.expr, Expr::Var(v) if v.id == name) && g.name == key,
        (Expr::Var(v), None) => v.id == name,
        _ => false,
    }
}
