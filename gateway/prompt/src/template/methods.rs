//! Methods of Python's strings, lists and dicts. What is not here is minijinja's own.

use minijinja::value::{Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::iterables::DictView;
use super::python::{is_space, lines};

/// Calls a method that the value itself does not have.
pub(super) fn call(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let own = match value.kind() {
        ValueKind::String => string(value.as_str().unwrap_or_default(), method, args)?,
        ValueKind::Seq => list(value, method, args)?,
        ValueKind::Map if method == "copy" => Some(value.clone()),
        ValueKind::Map if args.is_empty() => {
            value.as_object().and_then(|dict| DictView::of(dict, method)).map(Value::from_object)
        }
        _ => None,
    };
    match own {
        Some(result) => Ok(result),
        None => unknown_method_callback(state, value, method, args),
    }
}

fn wrong(reason: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

fn list(value: &Value, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    match method {
        "copy" => Ok(Some(value.clone())),
        "index" => {
            let (wanted,): (&Value,) = from_args(args)?;
            for (i, item) in value.try_iter()?.checked().enumerate() {
                if item? == *wanted {
                    return Ok(Some(Value::from(i)));
                }
            }
            Err(wrong("the item is not in the list"))
        }
        _ => Ok(None),
    }
}

fn string(s: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "strip" | "lstrip" | "rstrip" => trimmed(s, method, args)?,
        "split" | "rsplit" => split(s, method, args)?,
        "splitlines" => splitlines(s, args)?,
        "partition" | "rpartition" => partition(s, method, args)?,
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(s.strip_prefix(prefix).unwrap_or(s))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(s.strip_suffix(suffix).unwrap_or(s))
        }
        "index" | "rindex" => {
            let (wanted,): (&str,) = from_args(args)?;
            let at = if method == "index" { s.find(wanted) } else { s.rfind(wanted) };
            let at = at.ok_or_else(|| wrong("substring not found"))?;
            Value::from(s.get(..at).unwrap_or_default().chars().count())
        }
        "join" => return join(s, args).map(Some),
        "title" => {
            let () = from_args(args)?;
            Value::from(title_case(s))
        }
        "swapcase" => {
            let () = from_args(args)?;
            let swap = |c: char| -> String {
                if c.is_uppercase() { c.to_lowercase().collect() } else { c.to_uppercase().collect() }
            };
            Value::from(s.chars().map(swap).collect::<String>())
        }
        "casefold" => {
            let () = from_args(args)?;
            Value::from(s.to_lowercase().replace('ß', "ss"))
        }
        "isdecimal" | "isdigit" => {
            let () = from_args(args)?;
            Value::from(!s.is_empty() && s.chars().all(is_digit))
        }
        "istitle" => {
            let () = from_args(args)?;
            Value::from(s.chars().any(char::is_alphabetic) && title_case(s) == s)
        }
        "isspace" => {
            let () = from_args(args)?;
            Value::from(!s.is_empty() && s.chars().all(is_space))
        }
        "isidentifier" => {
            let () = from_args(args)?;
            let start = |c: char| c.is_alphabetic() || c == '_';
            Value::from(s.starts_with(start) && s.chars().all(|c| start(c) || c.is_numeric()))
        }
        "zfill" | "ljust" | "rjust" | "center" => padded(s, method, args)?,
        "expandtabs" => expanded(s, args)?,
        _ => return Ok(None),
    }))
}

/// The decimal digits of the scripts in use.
fn is_digit(c: char) -> bool {
    c.is_ascii_digit()
        || (c.is_numeric()
            && !c.is_ascii()
            && c.to_digit(10).is_none()
            && DIGITS.iter().any(|zero| (*zero..*zero + 10).contains(&u32::from(c))))
}

/// Zeros of the decimal digit ranges outside ASCII that are common (Unicode category Nd).
const DIGITS: [u32; 14] =
    [0x660, 0x6f0, 0x7c0, 0x966, 0x9e6, 0xa66, 0xae6, 0xb66, 0xbe6, 0xc66, 0xce6, 0xd66, 0xe50, 0xff10];

fn trimmed(s: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (chars,): (Option<&str>,) = from_args(args)?;
    let cut = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    Ok(Value::from(match method {
        "lstrip" => s.trim_start_matches(cut),
        "rstrip" => s.trim_end_matches(cut),
        _ => s.trim_matches(cut),
    }))
}

fn split(s: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator, most, named): (Option<&str>, Option<i64>, minijinja::value::Kwargs) = from_args(args)?;
    let separator = separator.or(named.get("sep")?);
    let most = most.or(named.get("maxsplit")?).and_then(|n| usize::try_from(n).ok());
    named.assert_all_used()?;
    let limit = most.map_or(usize::MAX, |n| n.saturating_add(1));
    let mut parts: Vec<&str> = match (separator, method) {
        (Some(""), _) => return Err(wrong("empty separator")),
        (Some(separator), "rsplit") => s.rsplitn(limit, separator).collect(),
        (Some(separator), _) => s.splitn(limit, separator).collect(),
        (None, "rsplit") => words_from_the_end(s, limit),
        (None, _) => words(s, limit),
    };
    if method == "rsplit" {
        parts.reverse();
    }
    Ok(Value::from(parts.into_iter().map(Value::from).collect::<Vec<_>>()))
}

/// Words between runs of space; the last of `limit` keeps what follows it.
fn words(s: &str, limit: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = s.trim_start_matches(is_space);
    while !rest.is_empty() {
        match rest.split_once(is_space) {
            Some((word, more)) if parts.len() + 1 < limit => {
                parts.push(word);
                rest = more.trim_start_matches(is_space);
            }
            _ => {
                parts.push(rest);
                rest = "";
            }
        }
    }
    parts
}

fn words_from_the_end(s: &str, limit: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = s.trim_end_matches(is_space);
    while !rest.is_empty() {
        match rest.rsplit_once(is_space) {
            Some((more, word)) if parts.len() + 1 < limit => {
                parts.push(word);
                rest = more.trim_end_matches(is_space);
            }
            _ => {
                parts.push(rest);
                rest = "";
            }
        }
    }
    parts
}

fn splitlines(s: &str, args: &[Value]) -> Result<Value, Error> {
    let (keep, named): (Option<bool>, minijinja::value::Kwargs) = from_args(args)?;
    let keep = keep.or(named.get("keepends")?).unwrap_or(false);
    named.assert_all_used()?;
    Ok(Value::from(lines(s, keep).into_iter().map(Value::from).collect::<Vec<_>>()))
}

fn partition(s: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator,): (&str,) = from_args(args)?;
    if separator.is_empty() {
        return Err(wrong("empty separator"));
    }
    let parts = match method {
        "partition" => s.split_once(separator).map_or([s, "", ""], |(a, b)| [a, separator, b]),
        _ => s.rsplit_once(separator).map_or(["", "", s], |(a, b)| [a, separator, b]),
    };
    Ok(Value::from(minijinja::value::Tuple::from(parts.map(Value::from))))
}

fn join(s: &str, args: &[Value]) -> Result<Value, Error> {
    let (items,): (&Value,) = from_args(args)?;
    let mut out = String::new();
    for (i, item) in items.try_iter()?.checked().enumerate() {
        let item = item?;
        if i > 0 {
            out.push_str(s);
        }
        out.push_str(item.as_str().ok_or_else(|| wrong("join takes strings only"))?);
    }
    Ok(Value::from(out))
}

/// Every run of letters with a capital.
fn title_case(s: &str) -> String {
    let mut out = String::with_capacity(s.len());
    let mut inside = false;
    for c in s.chars() {
        if inside {
            out.extend(c.to_lowercase())
        } else {
            out.extend(c.to_uppercase())
        }
        inside = c.is_alphabetic();
    }
    out
}

fn padded(s: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (width, fill): (i64, Option<char>) = from_args(args)?;
    let width = usize::try_from(width).unwrap_or(0).min(1 << 16);
    let room = width.saturating_sub(s.chars().count());
    let (sign, digits) = match s.strip_prefix(['-', '+']) {
        Some(digits) if method == "zfill" => (s.get(..1).unwrap_or_default(), digits),
        _ => ("", s),
    };
    let fill = if method == "zfill" { '0' } else { fill.unwrap_or(' ') };
    // as CPython: an odd space goes left where the width is odd
    let left = match method {
        "ljust" => 0,
        "center" => room / 2 + (room & width & 1),
        _ => room,
    };
    let pad = |n| std::iter::repeat_n(fill, n).collect::<String>();
    Ok(Value::from(format!("{sign}{}{digits}{}", pad(left), pad(room - left))))
}

fn expanded(s: &str, args: &[Value]) -> Result<Value, Error> {
    let (size,): (Option<i64>,) = from_args(args)?;
    let size = usize::try_from(size.unwrap_or(8)).unwrap_or(0).min(1 << 8);
    let mut out = String::with_capacity(s.len());
    let mut column = 0;
    for c in s.chars() {
        match c {
            '\t' => {
                let n = if size == 0 { 0 } else { size - column % size };
                out.extend(std::iter::repeat_n(' ', n));
                column += n;
            }
            '\n' | '\r' => {
                out.push(c);
                column = 0;
            }
            c => {
                out.push(c);
                column += 1;
            }
        }
    }
    Ok(Value::from(out))
}
