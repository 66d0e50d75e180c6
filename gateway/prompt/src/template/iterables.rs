//! What Python iterates over that is no list.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use minijinja::value::{DynObject, Enumerator, Object, ObjectRepr, Tuple, Value};

/// A generator: always true, has neither length nor items, and is used up when it has been gone over.
#[derive(Debug, Default)]
pub(super) struct Generator(Mutex<Vec<Value>>);

impl Generator {
    pub fn new(items: Vec<Value>) -> Self {
        Self(Mutex::new(items))
    }
}

impl Object for Generator {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn get_value(self: &Arc<Self>, _key: &Value) -> Option<Value> {
        Some(Value::UNDEFINED)
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        None
    }

    fn is_true(self: &Arc<Self>) -> bool {
        true
    }
}

/// What `dict.keys()`, `.values()` and `.items()` return: has a length, but no items.
#[derive(Debug)]
pub(super) struct DictView {
    name: &'static str,
    items: Vec<Value>,
}

impl DictView {
    /// The view that a method returns; `None` for other methods.
    pub fn of(dict: &DynObject, method: &str) -> Option<Self> {
        let pairs = dict.try_iter_pairs()?;
        let (name, items) = match method {
            "keys" => ("dict_keys", pairs.map(|(key, _)| key).collect()),
            "values" => ("dict_values", pairs.map(|(_, value)| value).collect()),
            "items" => ("dict_items", pairs.map(|(k, v)| Value::from(Tuple::from([k, v]))).collect()),
            _ => return None,
        };
        Some(Self { name, items })
    }

    /// The view's name and what it shows, as `repr` prints them.
    pub fn parts(&self) -> (&'static str, &[Value]) {
        (self.name, &self.items)
    }
}

impl Object for DictView {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn get_value(self: &Arc<Self>, _key: &Value) -> Option<Value> {
        Some(Value::UNDEFINED)
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.items.clone())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.items.len())
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
