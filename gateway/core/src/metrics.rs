//! Counters by name and labels, without a metrics library: the gateway exports what is registered here.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A count that only grows. Held by its users: when the last one is gone, the series is.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// One more.
    pub fn inc(&self) {
        self.add(1);
    }

    /// `n` more.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// The count.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// One series of a family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// Label names and values.
    pub labels: Vec<(String, String)>,
    /// The count.
    pub value: u64,
}

/// All series of one name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Family {
    /// The metric's name.
    pub name: String,
    /// What it means.
    pub help: String,
    /// Its series, by labels.
    pub samples: Vec<Sample>,
}

type Labels = Vec<(String, String)>;

#[derive(Debug, Default)]
struct Series {
    help: String,
    counters: BTreeMap<Labels, Weak<Counter>>,
}

/// The counters of the process. Asking twice for one name and labels gives one counter: that carries
/// counts over a reload.
#[derive(Debug, Default)]
pub struct Registry(Mutex<BTreeMap<String, Series>>);

impl Registry {
    /// The counter of this name and labels, at 0 if nobody holds it yet.
    pub fn counter(&self, name: &str, help: &str, labels: &[(&str, &str)]) -> Arc<Counter> {
        let labels: Labels = labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let mut families = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let series = families.entry(name.to_owned()).or_default();
        help.clone_into(&mut series.help);
        if let Some(counter) = series.counters.get(&labels).and_then(Weak::upgrade) {
            return counter;
        }
        let counter = Arc::new(Counter::default());
        series.counters.insert(labels, Arc::downgrade(&counter));
        counter
    }

    /// Everything that is still held.
    pub fn gather(&self) -> Vec<Family> {
        let mut families = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for series in families.values_mut() {
            series.counters.retain(|_, counter| counter.strong_count() > 0);
        }
        families.retain(|_, series| !series.counters.is_empty());
        families
            .iter()
            .map(|(name, series)| Family {
                name: name.clone(),
                help: series.help.clone(),
                samples: series
                    .counters
                    .iter()
                    .filter_map(|(labels, counter)| {
                        Some(Sample { labels: labels.clone(), value: counter.upgrade()?.get() })
                    })
                    .collect(),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_series_lives_as_long_as_its_holder_and_is_shared() {
        let registry = Registry::default();
        let a = registry.counter("hits_total", "Hits.", &[("ep_idx", "0")]);
        registry.counter("hits_total", "Hits.", &[("ep_idx", "0")]).add(2);
        assert_eq!(a.get(), 2);
        let all = registry.gather();
        assert_eq!(all.len(), 1);
        assert_eq!(all[0].samples, [Sample { labels: vec![("ep_idx".into(), "0".into())], value: 2 }]);
        drop(a);
        assert!(registry.gather().is_empty());
    }
}
