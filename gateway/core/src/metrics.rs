//! Counters and gauges by name and labels, without a metrics library: the gateway exports what is registered here.

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

/// A value that goes up and down. Held by its users: when the last one is gone, the series is.
#[derive(Debug, Default)]
pub struct Gauge(AtomicU64);

impl Gauge {
    /// The value is `n` now.
    pub fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }

    /// The value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What a family's values are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// Counts that only grow.
    Counter,
    /// Values that go up and down.
    Gauge,
}

/// One series of a family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// Label names and values.
    pub labels: Vec<(String, String)>,
    /// The value.
    pub value: u64,
}

/// All series of one name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Family {
    /// The metric's name.
    pub name: String,
    /// What it means.
    pub help: String,
    /// What its values are.
    pub kind: MetricKind,
    /// Its series, by labels.
    pub samples: Vec<Sample>,
}

type Labels = Vec<(String, String)>;

#[derive(Debug, Default)]
struct Series<T> {
    help: String,
    held: BTreeMap<Labels, Weak<T>>,
}

/// All families of one kind, by name.
#[derive(Debug, Default)]
struct Families<T>(Mutex<BTreeMap<String, Series<T>>>);

impl<T: Default> Families<T> {
    fn get(&self, name: &str, help: &str, labels: &[(&str, &str)]) -> Arc<T> {
        let labels: Labels = labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let mut families = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let series = families.entry(name.to_owned()).or_default();
        help.clone_into(&mut series.help);
        if let Some(known) = series.held.get(&labels).and_then(Weak::upgrade) {
            return known;
        }
        let value = Arc::new(T::default());
        series.held.insert(labels, Arc::downgrade(&value));
        value
    }

    fn gather(&self, kind: MetricKind, value: fn(&T) -> u64) -> Vec<Family> {
        let mut families = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for series in families.values_mut() {
            series.held.retain(|_, held| held.strong_count() > 0);
        }
        families.retain(|_, series| !series.held.is_empty());
        let sample = |(labels, held): (&Labels, &Weak<T>)| {
            Some(Sample { labels: labels.clone(), value: value(&*held.upgrade()?) })
        };
        let family = |(name, series): (&String, &Series<T>)| Family {
            name: name.clone(),
            help: series.help.clone(),
            kind,
            samples: series.held.iter().filter_map(sample).collect(),
        };
        families.iter().map(family).collect()
    }
}

/// The counters and gauges of the process. Asking twice for one name and labels gives one series: that carries
/// counts over a reload.
#[derive(Debug, Default)]
pub struct Registry {
    counters: Families<Counter>,
    gauges: Families<Gauge>,
}

impl Registry {
    /// The counter of this name and labels, at 0 if nobody holds it yet.
    pub fn counter(&self, name: &str, help: &str, labels: &[(&str, &str)]) -> Arc<Counter> {
        self.counters.get(name, help, labels)
    }

    /// The gauge of this name and labels, at 0 if nobody holds it yet.
    pub fn gauge(&self, name: &str, help: &str, labels: &[(&str, &str)]) -> Arc<Gauge> {
        self.gauges.get(name, help, labels)
    }

    /// Everything that is still held.
    pub fn gather(&self) -> Vec<Family> {
        let mut all = self.counters.gather(MetricKind::Counter, Counter::get);
        all.extend(self.gauges.gather(MetricKind::Gauge, Gauge::get));
        all
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
        let size = registry.gauge("size", "Size.", &[]);
        size.set(7);
        assert_eq!(registry.gather()[1].kind, MetricKind::Gauge);
        assert_eq!(registry.gather()[1].samples, [Sample { labels: vec![], value: 7 }]);
        drop((a, size));
        assert!(registry.gather().is_empty());
    }
}
