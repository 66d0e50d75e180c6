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

    /// Their sum. Where there is none, because nobody answered or nothing is called so, no number: it meets no target.
    pub fn sum(&self, name: &str, labels: &[&str]) -> f64 {
        let all = self.all(name, labels);
        if all.is_empty() { f64::NAN } else { all.iter().sum() }
    }

    /// How many series there are.
    pub fn count(&self) -> usize {
        self.series().count()
    }

    /// Requests that are over, whatever came of them: told by rules, or before one took them.
    pub fn outcomes(&self) -> f64 {
        self.sum("kvgate_requests_total", &[]) + self.sum("kvgate_errors_total", &["service=\"\""])
    }

    /// What is held for requests: places on engines, requests under way, and waits where rules have `queues`. All of
    /// them must be there, as for [`Metrics::sum`].
    pub fn held(&self, queues: bool) -> f64 {
        let always = ["kvgate_leases_open", "kvgate_requests_open", "kvgate_endpoint_in_flight"];
        let waits = queues.then_some("kvgate_admission_queue_length");
        always.into_iter().chain(waits).map(|name| self.sum(name, &[])).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_not_nothing() {
        let page = "kvgate_leases_open 0\nkvgate_requests_open 0\nkvgate_endpoint_in_flight{ep=\"a\"} 0\n";
        let metrics = Metrics::new(page.into());
        assert_eq!(metrics.held(false), 0.0);
        assert!(metrics.held(true).is_nan(), "no queue is told of");
        let waits = Metrics::new(format!("{page}kvgate_admission_queue_length 2\n"));
        assert_eq!(waits.held(true), 2.0);
        assert!(Metrics::default().held(false).is_nan() && Metrics::default().outcomes().is_nan());
        assert!(metrics.sum("kvgate_endpoint_in_flight", &["ep=\"b\""]).is_nan());
    }
}
