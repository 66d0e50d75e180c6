//! Which requests a rule serves, and which of several rules does.

use serde::Deserialize;

/// `[match]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Match {
    /// The name of the listener; `None` is any.
    pub listener: Option<String>,
    /// Hosts in lower case; empty is any.
    pub hosts: Vec<String>,
    /// The start of the path, in whole segments; no `/` at its end but for the root's.
    pub path_prefix: String,
    /// Models; empty is any, and the model of requests that name none.
    pub models: Vec<String>,
}

/// How specific a match is: of the rules that match a request, the greatest serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Specificity {
    listener: bool,
    host: bool,
    path: usize,
    model: bool,
}

impl Match {
    /// How specific it is.
    pub fn specificity(&self) -> Specificity {
        Specificity {
            listener: self.listener.is_some(),
            host: !self.hosts.is_empty(),
            path: self.path_prefix.len(),
            model: !self.models.is_empty(),
        }
    }

    /// Whether a request to this listener, host and path may be its own. The host is as the client sent it, with
    /// or without port; the path is without query.
    pub fn head(&self, listener: &str, host: Option<&str>, path: &str) -> bool {
        self.listener.as_deref().is_none_or(|name| name == listener)
            && (self.hosts.is_empty()
                || host
                    .map(without_port)
                    .is_some_and(|h| self.hosts.iter().any(|o| o.eq_ignore_ascii_case(h))))
            && self.covers_path(path)
    }

    /// Whether a request for this model is its own, if its head is.
    pub fn model(&self, model: Option<&str>) -> bool {
        self.models.is_empty() || model.is_some_and(|model| self.models.iter().any(|own| own == model))
    }

    pub(super) fn covers_path(&self, path: &str) -> bool {
        self.path_prefix == "/"
            || path
                .strip_prefix(&self.path_prefix)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    /// Brings hosts and path to the form they are compared in.
    pub(super) fn normalize(&mut self) {
        for host in &mut self.hosts {
            host.make_ascii_lowercase();
        }
        while self.path_prefix.len() > 1 && self.path_prefix.ends_with('/') {
            self.path_prefix.pop();
        }
    }
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if !port.contains(']') && port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(hosts: &[&str], path: &str, models: &[&str]) -> Match {
        let own = |texts: &[&str]| texts.iter().map(|t| (*t).to_owned()).collect();
        let mut m =
            Match { listener: None, hosts: own(hosts), path_prefix: path.into(), models: own(models) };
        m.normalize();
        m
    }

    #[test]
    fn heads() {
        let m = of(&["LLM.example.com", "[::1]"], "/v1/", &[]);
        for (host, path, good) in [
            (Some("llm.example.com"), "/v1", true),
            (Some("LLM.EXAMPLE.COM:8080"), "/v1/models", true),
            (Some("[::1]:80"), "/v1/", true),
            (Some("[::1]"), "/v1/", true),
            (Some("llm.example.com"), "/v1beta", false),
            (Some("llm.example.com"), "/", false),
            (Some("example.com"), "/v1", false),
            (None, "/v1", false),
        ] {
            assert_eq!(m.head("edge", host, path), good, "{host:?} {path}");
        }
        let named = Match { listener: Some("edge".into()), ..of(&[], "/", &[]) };
        assert!(named.head("edge", None, "*"));
        assert!(!named.head("other", Some("h"), "/"));
    }

    #[test]
    fn models_match_exactly_and_any_includes_none() {
        assert!(of(&[], "/", &[]).model(None));
        assert!(of(&[], "/", &["a/B"]).model(Some("a/B")));
        assert!(!of(&[], "/", &["a/B"]).model(Some("a/b")));
        assert!(!of(&[], "/", &["a/B"]).model(None));
    }

    #[test]
    fn listener_before_host_before_path_before_model() {
        let listener = Match { listener: Some("edge".into()), ..of(&[], "/", &[]) };
        let order =
            [listener, of(&["h"], "/", &[]), of(&[], "/v1", &[]), of(&[], "/", &["m"]), of(&[], "/", &[])];
        assert!(order.windows(2).all(|w| w[0].specificity() > w[1].specificity()));
    }
}
