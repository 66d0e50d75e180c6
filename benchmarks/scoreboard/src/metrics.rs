//! A page of metrics, read.

/// A page in Prometheus' text format.
#[derive(Clone, Debug, Default)]
pub struct Metrics(String);

impl Metrics {
    /// This page.
    pub fn new(page: String) -> Self {
        Self(page)
    }

    fn series(&self) -> impl Iterator<Item = (&str, &str, f64)> {
        self.0.lines().filter(|line| !line.starts_with('#')).filter_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            Some((name, labels, value.parse().ok()?))
        })
    }

    /// The values of the series of this name whose labels hold all of these, `a="1"` say.
    pub fn all(&self, name: &str, labels: &[&str]) -> Vec<f64> {
        let has = |own: &str| labels.iter().all(|label| own.contains(label));
        self.series().filter(|(n, own, _)| *n == name && has(own)).map(|(_, _, value)| value).collect()
    }

    /// Their sum; 0 where there is none.
    pub fn sum(&self, name: &str, labels: &[&str]) -> f64 {
        self.all(name, labels).iter().sum()
    }

    /// How many series there are.
    pub fn count(&self) -> usize {
        self.series().count()
    }

    /// Requests that are over, whatever came of them: told by rules, or before one took them.
    pub fn outcomes(&self) -> f64 {
        self.sum("kvgate_requests_total", &[]) + self.sum("kvgate_errors_total", &["service=\"\""])
    }

    /// What is held for requests: places on engines, requests under way, waits.
    pub fn held(&self) -> f64 {
        [
            "kvgate_leases_open",
            "kvgate_requests_open",
            "kvgate_endpoint_in_flight",
            "kvgate_admission_queue_length",
        ]
        .iter()
        .map(|name| self.sum(name, &[]))
        .sum()
    }
}
