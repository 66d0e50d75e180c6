//! Filters and tests where Jinja2 (with transformers' own `tojson`) differs from minijinja.

use minijinja::value::{Kwargs, Rest, Value, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State};

use super::dumps::Dumps;
use super::iterables::{DictView, Generator};
use super::operators::escaped;
use super::python;

/// Filters whose result Jinja2 makes while it is iterated over: true, without length or items, used up by one loop.
const LAZY: [(&str, &str); 10] = [
    ("map", "__map"),
    ("select", "__select"),
    ("reject", "__reject"),
    ("selectattr", "__selectattr"),
    ("rejectattr", "__rejectattr"),
    ("unique", "__unique"),
    ("batch", "__batch"),
    ("slice", "__slice"),
    ("items", "__items"),
    ("reverse", "__reverse"),
];

pub(super) fn add(env: &mut Environment<'_>) {
    use minijinja::filters as f;
    env.add_filter("__map", f::map);
    env.add_filter("__select", f::select);
    env.add_filter("__reject", f::reject);
    env.add_filter("__selectattr", f::selectattr);
    env.add_filter("__rejectattr", f::rejectattr);
    env.add_filter("__unique", f::unique);
    env.add_filter("__batch", f::batch);
    env.add_filter("__slice", f::slice);
    env.add_filter("__items", f::items);
    env.add_filter("__reverse", f::reverse);
    for (name, inner) in LAZY {
        env.add_filter(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            lazy(state, inner, &args.into_values())
        });
    }
    for name in ["zip", "chain", "split", "lines", "bool"] {
        env.remove_filter(name);
    }
    for name in ["startingwith", "endingwith"] {
        env.remove_test(name);
    }
    env.add_filter("tojson", tojson);
    env.add_filter("string", |v: Value| match v.kind() {
        ValueKind::String => Ok(v),
        _ => python::str(&v).map(Value::from),
    });
    env.add_filter("trim", |v: &Value, chars: Option<&str>| -> Result<String, Error> {
        let text = python::str(v)?;
        Ok(match chars {
            Some(chars) => text.trim_matches(|c| chars.contains(c)),
            None => python::strip(&text),
        }
        .to_owned())
    });
    env.add_filter("join", join);
    env.add_filter("indent", indent);
    env.add_filter("__list", f::list);
    env.add_filter("__sum", f::sum);
    env.add_filter("__min", f::min);
    env.add_filter("__max", f::max);
    env.add_filter("__sort", f::sort);
    for (name, inner) in
        [("list", "__list"), ("sum", "__sum"), ("min", "__min"), ("max", "__max"), ("sort", "__sort")]
    {
        env.add_filter(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            iterable(args.first())?;
            state.apply_filter(inner, &args)
        });
    }
    env.add_filter("last", |v: Value| match v.kind() {
        ValueKind::Iterable if v.len().is_none() => Err(wrong("what is iterated over has no last item")),
        _ => f::last(v),
    });
    env.add_filter("attr", |v: &Value, name: &str| match v.kind() {
        ValueKind::Map => Ok(Value::UNDEFINED), // items are no attributes
        _ => v.get_attr(name),
    });
    env.add_filter("title", |v: &Value| -> Result<String, Error> { Ok(f::title(python::str(v)?.into())) });
    env.add_filter("__int", f::int);
    env.add_filter("__float", f::float);
    for (name, inner, zero) in [("int", "__int", Value::from(0)), ("float", "__float", Value::from(0.0))] {
        env.add_filter(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            state.apply_filter(inner, &args.into_values()).unwrap_or_else(|_| zero.clone())
        });
    }
    for name in ["e", "escape"] {
        env.add_filter(name, |v: &Value| -> Result<Value, Error> {
            if v.is_safe() { Ok(v.clone()) } else { Ok(Value::from_safe_string(escaped(&python::str(v)?))) }
        });
    }
    env.add_filter("forceescape", |v: &Value| -> Result<Value, Error> {
        Ok(Value::from_safe_string(escaped(&python::str(v)?)))
    });
    for (name, filter) in [("upper", str::to_uppercase as fn(&str) -> String), ("lower", str::to_lowercase)] {
        env.add_filter(name, move |v: &Value| -> Result<String, Error> { Ok(filter(&python::str(v)?)) });
    }
    env.add_test("iterable", |v: &Value| {
        matches!(
            v.kind(),
            ValueKind::Seq | ValueKind::Iterable | ValueKind::Map | ValueKind::String | ValueKind::Undefined
        )
    });
    env.add_test("sequence", |v: &Value| match v.kind() {
        ValueKind::Iterable => v.len().is_some() && v.downcast_object_ref::<DictView>().is_none(),
        kind => matches!(kind, ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Undefined),
    });
    env.add_test("odd", |v: &Value| remainder(v, 2.0).map(|r| r == 1.0));
    env.add_test("even", |v: &Value| remainder(v, 2.0).map(|r| r == 0.0));
    env.add_test("divisibleby", |v: &Value, by: f64| remainder(v, by).map(|r| r == 0.0));
    env.add_test("callable", |v: &Value| v.kind() == ValueKind::Plain);
}

fn remainder(value: &Value, by: f64) -> Result<f64, Error> {
    match value.kind() {
        ValueKind::Bool if by != 0.0 => Ok(f64::from(u8::from(value.is_true())).rem_euclid(by)),
        ValueKind::Number if by != 0.0 => Ok(f64::try_from(value.clone())?.rem_euclid(by)),
        _ => Err(wrong("% of something that is not a number, or by zero")),
    }
}

/// Nothing iterates over `None`.
fn iterable(value: Option<&Value>) -> Result<(), Error> {
    if value.is_some_and(Value::is_none) { Err(wrong("'NoneType' object is not iterable")) } else { Ok(()) }
}

fn wrong(reason: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

fn lazy(state: &mut State, inner: &str, args: &[Value]) -> Result<Value, Error> {
    let falsy = args.first().is_none_or(|value| !value.is_true());
    if falsy && matches!(inner, "__map" | "__select" | "__reject" | "__selectattr" | "__rejectattr") {
        return Ok(Value::from_object(Generator::default()));
    }
    iterable(args.first())?;
    let made = state.apply_filter(inner, args)?;
    match made.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            let items = made.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?;
            Ok(Value::from_object(Generator::new(items)))
        }
        _ => Ok(made),
    }
}

/// `indent`: spaces before every line but the first and the empty ones, unless asked for.
fn indent(
    text: &Value,
    width: Option<&Value>,
    first: Option<bool>,
    blank: Option<bool>,
    options: Kwargs,
) -> Result<String, Error> {
    let named: Option<Value> = options.get("width")?;
    let by = match width.or(named.as_ref()) {
        None => " ".repeat(4),
        Some(width) => match width.as_str() {
            Some(by) => by.to_owned(),
            None => " ".repeat(usize::try_from(width.clone())?.min(256)),
        },
    };
    let first = first.or(options.get("first")?).unwrap_or(false);
    let blank = blank.or(options.get("blank")?).unwrap_or(false);
    options.assert_all_used()?;
    let text =
        text.as_str().ok_or_else(|| wrong("indent of something that is not a string"))?.to_owned() + "\n";
    let mut out = String::with_capacity(text.len() * 2);
    for (i, line) in python::lines(&text, false).into_iter().enumerate() {
        if i > 0 {
            out.push('\n');
        }
        if if i == 0 { first } else { blank || !line.is_empty() } {
            out.push_str(&by);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// `join`, over what `str` makes of the items.
fn join(value: &Value, joiner: Option<&Value>, options: Kwargs) -> Result<String, Error> {
    let joiner = match joiner {
        Some(joiner) => python::str(joiner)?,
        None => options.get::<Option<String>>("d")?.unwrap_or_default(),
    };
    let attribute: Option<Value> = options.get("attribute")?;
    options.assert_all_used()?;
    iterable(Some(value))?;
    let mut out = String::new();
    for (i, item) in value.try_iter()?.checked().enumerate() {
        let item = item?;
        if i > 0 {
            out.push_str(&joiner);
        }
        match &attribute {
            Some(key) => python::write_str(&item.get_item(key)?, &mut out)?,
            None => python::write_str(&item, &mut out)?,
        }
    }
    Ok(out)
}

/// `json.dumps` as transformers offers it to templates.
fn tojson(value: &Value, ensure_ascii: Option<bool>, options: Kwargs) -> Result<String, Error> {
    let indent: Option<Value> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let indent = match indent {
        None => None,
        Some(v) if v.is_none() => None,
        Some(v) => Some(match v.as_str() {
            Some(s) => s.to_owned(),
            None => " ".repeat(usize::try_from(v.clone()).unwrap_or(0).min(64)),
        }),
    };
    let mut separators = separators.unwrap_or_default().into_iter();
    let dumps = Dumps {
        item: separators.next().unwrap_or_else(|| if indent.is_some() { "," } else { ", " }.into()),
        key: separators.next().unwrap_or_else(|| ": ".into()),
        indent,
        ascii: options.get::<Option<bool>>("ensure_ascii")?.or(ensure_ascii).unwrap_or(false),
        sort: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    let mut out = String::new();
    dumps.write(value, &mut out)?;
    Ok(out)
}
