//! A page of metrics, read.

use std::collections::HashSet;

/// What operators are told of them.
const DOCUMENTED: &str = include_str!("../../../../../docs/operations.md");

/// A page in Prometheus' text format.
#[derive(Clone, Debug)]
pub struct Metrics(String);

struct Series<'a> {
    name: &'a str,
    labels: &'a str,
    value: f64,
}

impl Metrics {
    /// Any page of a gateway: every series is told once, and what it means before it and in the operator's manual.
    pub fn new(page: String) -> Self {
        let (mut told, mut series) = (HashSet::new(), HashSet::new());
        for line in page.lines() {
            let mut words = line.splitn(4, ' ');
            match (words.next(), words.next(), words.next(), words.next()) {
                (Some("#"), Some("HELP"), Some(name), Some(help)) if !help.is_empty() => {
                    assert!(told.insert(name.to_owned()), "{name} twice");
                    assert!(DOCUMENTED.contains(&format!("`{name}`")), "{name} is not in docs/operations.md");
                }
                (Some("#"), Some("TYPE"), Some(name), Some("counter" | "gauge" | "histogram")) => {
                    assert!(told.contains(name), "{name} without help");
                }
                (Some(name), ..) if !name.starts_with('#') => {
                    let family = name.split('{').next().unwrap();
                    let base = ["_bucket", "_sum", "_count"].iter().find_map(|end| family.strip_suffix(end));
                    assert!(told.contains(family) || base.is_some_and(|base| told.contains(base)), "{line}");
                    assert!(series.insert(name.to_owned()), "{line} twice");
                }
                _ => panic!("{line}"),
            }
        }
        Self(page)
    }

    /// Every series.
    fn series(&self) -> impl Iterator<Item = Series<'_>> {
        self.0.lines().filter(|line| !line.starts_with('#')).map(|line| {
            let (series, value) = line.rsplit_once(' ').expect("a value");
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            Series { name, labels, value: value.parse().expect("a number") }
        })
    }

    /// The values of the series of this name that have these labels, `a="1"` say, among theirs.
    pub fn all(&self, name: &str, labels: &[&str]) -> Vec<f64> {
        let has = |series: &Series<'_>| {
            let own = |label: &str| {
                series
                    .labels
                    .match_indices(label)
                    .any(|(at, _)| at == 0 || series.labels.as_bytes().get(at - 1) == Some(&b','))
            };
            series.name == name && labels.iter().all(|label| own(label))
        };
        self.series().filter(has).map(|series| series.value).collect()
    }

    /// The value of the one series of this name with these labels.
    pub fn get(&self, name: &str, labels: &[&str]) -> f64 {
        let all = self.all(name, labels);
        assert_eq!(all.len(), 1, "{name} {labels:?} in\n{}", self.0);
        all[0]
    }

    /// Their sum.
    pub fn sum(&self, name: &str, labels: &[&str]) -> f64 {
        self.all(name, labels).iter().sum()
    }

    /// Lines, comments included.
    pub fn lines(&self) -> usize {
        self.0.lines().count()
    }
}
