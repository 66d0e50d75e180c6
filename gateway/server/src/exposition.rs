//! The Prometheus text format, from values that live elsewhere.

use std::collections::BTreeMap;

use kvgate_core::{Family, MetricKind, Registry};
use prometheus::core::Collector;
use prometheus::proto::{Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType};
use prometheus::{Encoder, TextEncoder};

/// Label names and values of one series.
pub type Labels<'a> = &'a [(&'a str, &'a str)];

/// A page of metrics under construction. Values are read when the page is asked for, never copied ahead.
#[derive(Default)]
pub struct Exposition {
    families: BTreeMap<String, MetricFamily>,
}

impl Exposition {
    /// Adds a series that only grows.
    pub fn counter(&mut self, name: &str, help: &str, labels: Labels<'_>, value: u64) {
        let mut counter = Counter::default();
        counter.set_value(value as f64);
        let mut metric = Metric::default();
        metric.set_counter(counter);
        self.add(name, help, MetricType::COUNTER, labels, metric);
    }

    /// Adds a series that goes up and down.
    pub fn gauge(&mut self, name: &str, help: &str, labels: Labels<'_>, value: f64) {
        let mut gauge = Gauge::default();
        gauge.set_value(value);
        let mut metric = Metric::default();
        metric.set_gauge(gauge);
        self.add(name, help, MetricType::GAUGE, labels, metric);
    }

    /// Adds a histogram: upper bounds, rising, each with how many were at most that; their sum; how many there were.
    pub fn histogram(
        &mut self,
        name: &str,
        help: &str,
        labels: Labels<'_>,
        buckets: &[(f64, u64)],
        sum: f64,
        count: u64,
    ) {
        let bucket = |(bound, count): &(f64, u64)| {
            let mut bucket = Bucket::default();
            bucket.set_upper_bound(*bound);
            bucket.set_cumulative_count(*count);
            bucket
        };
        let mut histogram = Histogram::default();
        // the encoder writes the infinite one itself, from the count
        let finite = buckets.iter().filter(|(bound, _)| bound.is_finite());
        histogram.set_bucket(finite.map(bucket).collect());
        histogram.set_sample_sum(sum);
        histogram.set_sample_count(count);
        let mut metric = Metric::default();
        metric.set_histogram(histogram);
        self.add(name, help, MetricType::HISTOGRAM, labels, metric);
    }

    /// Adds everything in a registry.
    pub fn registry(&mut self, registry: &Registry) {
        for Family { name, help, kind, samples } in registry.gather() {
            for sample in samples {
                let labels: Vec<_> = sample.labels.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
                match kind {
                    MetricKind::Counter => self.counter(&name, &help, &labels, sample.value),
                    MetricKind::Gauge => self.gauge(&name, &help, &labels, sample.value as f64),
                }
            }
        }
    }

    /// Adds what a collector of the metrics library holds: histograms.
    pub fn collect(&mut self, collector: &impl Collector) {
        for family in collector.collect() {
            match self.families.get_mut(family.name()) {
                Some(known) => known.mut_metric().extend(family.get_metric().iter().cloned()),
                None => {
                    self.families.insert(family.name().to_owned(), family);
                }
            }
        }
    }

    fn add(&mut self, name: &str, help: &str, kind: MetricType, labels: Labels<'_>, mut metric: Metric) {
        let pair = |(name, value): &(&str, &str)| {
            let mut pair = LabelPair::default();
            pair.set_name((*name).to_owned());
            pair.set_value((*value).to_owned());
            pair
        };
        metric.set_label(labels.iter().map(pair).collect());
        let family = self.families.entry(name.to_owned()).or_insert_with(|| {
            let mut family = MetricFamily::default();
            family.set_name(name.to_owned());
            family.set_help(help.to_owned());
            family.set_field_type(kind);
            family
        });
        family.mut_metric().push(metric);
    }

    /// The page.
    pub fn render(self) -> String {
        let mut page = Vec::new();
        let families: Vec<_> = self.families.into_values().collect();
        if let Err(e) = TextEncoder::new().encode(&families, &mut page) {
            tracing::error!(error = %e, "the metrics page is incomplete");
        }
        String::from_utf8(page).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_written_once_with_all_their_series() {
        let registry = Registry::default();
        let held = registry.counter("b_total", "B.", &[("reason", "x\"y")]);
        held.add(3);
        let size = registry.gauge("c", "C.", &[]);
        size.set(5);
        let mut page = Exposition::default();
        page.gauge("a", "A.", &[("ep", "1")], 1.0);
        page.gauge("a", "A.", &[("ep", "2")], 0.5);
        page.histogram("d", "D.", &[("ep", "1")], &[(0.5, 1), (f64::INFINITY, 2)], 3.25, 2);
        page.registry(&registry);
        assert_eq!(
            page.render(),
            "# HELP a A.\n# TYPE a gauge\na{ep=\"1\"} 1\na{ep=\"2\"} 0.5\n\
             # HELP b_total B.\n# TYPE b_total counter\nb_total{reason=\"x\\\"y\"} 3\n\
             # HELP c C.\n# TYPE c gauge\nc 5\n\
             # HELP d D.\n# TYPE d histogram\nd_bucket{ep=\"1\",le=\"0.5\"} 1\n\
             d_bucket{ep=\"1\",le=\"+Inf\"} 2\nd_sum{ep=\"1\"} 3.25\nd_count{ep=\"1\"} 2\n"
        );
    }
}
