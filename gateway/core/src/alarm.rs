//! Conditions an operator has to know of.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

type Detail = Box<dyn Fn() -> String + Send + Sync>;

/// A named condition of a rule that is on or off, with what to do about it.
#[derive(Default)]
pub struct Alarm {
    detail: Mutex<Option<Detail>>,
}

impl Alarm {
    /// Turns it on. True if it was off: the moment to write one log line.
    pub fn raise(&self, detail: impl Into<String>) -> bool {
        let detail = detail.into();
        self.raise_with(move || detail.clone())
    }

    /// As [`Alarm::raise`], with a detail that is put into words whenever it is read. It runs under a lock: briefly, and
    /// asking nothing of the alarm.
    pub fn raise_with(&self, detail: impl Fn() -> String + Send + Sync + 'static) -> bool {
        self.lock().replace(Box::new(detail)).is_none()
    }

    /// Turns it off. True if it was on.
    pub fn clear(&self) -> bool {
        self.lock().take().is_some()
    }

    /// What is wrong, and the fix, while it is on.
    pub fn detail(&self) -> Option<String> {
        self.lock().as_ref().map(|detail| detail())
    }

    fn lock(&self) -> MutexGuard<'_, Option<Detail>> {
        self.detail.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Alarm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Alarm").field(&self.detail()).finish()
    }
}

type Key = (String, &'static str);

/// The alarms of the process by rule and name. Same rule and name give the same alarm, as long as it is held.
#[derive(Debug, Default)]
pub struct Alarms(Mutex<BTreeMap<Key, Weak<Alarm>>>);

impl Alarms {
    /// The alarm `name` of `rule`, off if it is new.
    pub fn get(&self, rule: &str, name: &'static str) -> Arc<Alarm> {
        let mut alarms = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let place = alarms.entry((rule.to_owned(), name)).or_default();
        place.upgrade().unwrap_or_else(|| {
            let alarm = Arc::new(Alarm::default());
            *place = Arc::downgrade(&alarm);
            alarm
        })
    }

    /// All that are held: rule, name, and the detail of those that are on.
    pub fn all(&self) -> Vec<(String, &'static str, Option<String>)> {
        let mut alarms = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        alarms.retain(|_, alarm| alarm.strong_count() > 0);
        let held = alarms.iter().filter_map(|((rule, name), alarm)| {
            alarm.upgrade().map(|alarm| (rule.clone(), *name, alarm.detail()))
        });
        held.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn a_detail_is_put_into_words_when_it_is_read() {
        let (alarm, said) = (Alarm::default(), Arc::new(AtomicUsize::new(0)));
        let count = Arc::clone(&said);
        assert!(alarm.raise_with(move || format!("said {} times", count.fetch_add(1, Ordering::Relaxed))));
        assert_eq!(said.load(Ordering::Relaxed), 0);
        assert_eq!(alarm.detail().as_deref(), Some("said 0 times"));
        assert_eq!(alarm.detail().as_deref(), Some("said 1 times"));
        assert!(!alarm.raise("something else"));
        assert_eq!(alarm.detail().as_deref(), Some("something else"));
    }

    #[test]
    fn an_alarm_says_when_it_changes_and_vanishes_with_its_holder() {
        let alarms = Alarms::default();
        let alarm = alarms.get("qwen3", "kv_zero_hits");
        assert!(alarm.raise("wrong seed"));
        assert!(!alarms.get("qwen3", "kv_zero_hits").raise("wrong seed"));
        assert_eq!(alarms.all(), [("qwen3".into(), "kv_zero_hits", Some("wrong seed".into()))]);
        assert!(alarm.clear());
        assert!(!alarm.clear());
        drop(alarm);
        assert!(alarms.all().is_empty());
    }
}
