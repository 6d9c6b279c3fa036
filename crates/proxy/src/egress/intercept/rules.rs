//! Selection of the rule that applies to a request, and the headers that it sets.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, OnceLock};

use formats::percent::{Plus, decode};
use http::header::{HeaderMap, HeaderName, HeaderValue};
use model::header::settable_name;
use model::injection::path::normalize_path;
use model::injection::{HeaderChoice, InjectionRule, Interception, PathPattern};
use model::network::EgressPolicy;

use super::mask::Masker;

/// The rules of a policy, ready to be applied.
pub(super) struct Rules {
    policy: Arc<EgressPolicy>,
    prepared: Vec<Prepared>,
}

/// What is computed once per rule.
struct Prepared {
    headers: Vec<(HeaderName, HeaderValue)>,
    masker: OnceLock<Arc<Masker>>,
}

impl fmt::Debug for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rules")
            .field("rules", &self.prepared.len())
            .finish_non_exhaustive()
    }
}

/// A rule that applies to a request.
#[derive(Clone)]
pub(super) struct Applied {
    rules: Arc<Rules>,
    index: usize,
}

/// Whether a connection to this name and port is intercepted.
pub(crate) fn is_intercepted(interception: &Interception, host: &str, port: u16) -> bool {
    let mut rules = interception.rules.iter();
    rules.any(|rule| rule.port == port && rule.host.matches(host))
}

/// The parts of a request by which rules are chosen.
#[derive(Debug, Clone, Copy)]
pub(super) struct Facts<'a> {
    /// The host and the port of its connection, which are those of the request.
    pub(super) host: &'a str,
    pub(super) port: u16,
    /// The path that the client sent.
    pub(super) path: &'a str,
    pub(super) query: Option<&'a str>,
    pub(super) headers: &'a HeaderMap,
}

impl Rules {
    pub(super) fn new(policy: Arc<EgressPolicy>) -> Self {
        let rules = policy.interception.iter().flat_map(|interception| &interception.rules);
        let prepared = rules.map(Prepared::new).collect();
        Self { policy, prepared }
    }

    /// Whether these rules were made of this policy.
    pub(super) fn are_of(&self, policy: &Arc<EgressPolicy>) -> bool {
        Arc::ptr_eq(&self.policy, policy)
    }

    fn rules(&self) -> &[InjectionRule] {
        let interception = self.policy.interception.as_ref();
        interception.map_or(&[], |interception| &interception.rules)
    }

    /// The rule for a request: the one with the most specific path, and of several the first.
    pub(super) fn choose(self: &Arc<Self>, facts: &Facts<'_>) -> Option<Applied> {
        // Computed once, and only if a rule needs it.
        let normalized = OnceLock::new();
        let rank = |pattern: &PathPattern| {
            let path = || normalized.get_or_init(|| normalize_path(facts.path)).as_deref();
            match pattern {
                PathPattern::Any => Some(0),
                PathPattern::Prefix(prefix) => path()?.starts_with(prefix.as_str()).then_some(1 + prefix.len()),
                PathPattern::Exact(exact) => (path()? == exact).then_some(usize::MAX),
            }
        };
        let mut best: Option<(usize, usize)> = None;
        for (index, rule) in self.rules().iter().enumerate() {
            if rule.port != facts.port || !rule.host.matches(facts.host) {
                continue;
            }
            let Some(rank) = rank(&rule.path) else { continue };
            if best.is_none_or(|(highest, _)| rank > highest) && fulfils(rule, facts) {
                best = Some((rank, index));
            }
        }
        let rules = Arc::clone(self);
        best.map(|(_, index)| Applied { rules, index })
    }
}

/// Whether a request has what a rule requires.
fn fulfils(rule: &InjectionRule, facts: &Facts<'_>) -> bool {
    let has_header = |(name, value): (&String, &String)| {
        let sent = facts.headers.get(name.as_str());
        sent.is_some_and(|sent| sent.as_bytes() == value.as_bytes())
    };
    let has_query = |(name, value): (&String, &String)| {
        let mut parameters = facts.query.unwrap_or_default().split('&').map(|parameter| {
            let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            [name, value].map(|text| decode(text, Plus::Space))
        });
        let first = parameters.find(|[sent, _]| sent.as_ref() == Ok(name));
        first.is_some_and(|[_, sent]| sent.as_ref() == Ok(value))
    };
    rule.if_headers.iter().all(has_header) && rule.if_queries.iter().all(has_query)
}

impl Prepared {
    fn new(rule: &InjectionRule) -> Self {
        let headers = rule.headers.iter().filter_map(|header| {
            let name = HeaderName::from_bytes(header.name.as_bytes()).ok();
            let value = HeaderValue::from_str(header.value.expose()).ok();
            let Some((name, mut value)) = name.zip(value).filter(|(name, _)| settable_name(name.as_str()).is_ok())
            else {
                tracing::warn!(
                    rule = rule.name,
                    header = header.name,
                    "a header of an injection rule cannot be set, requests go without it: correct the rule"
                );
                return None;
            };
            // Never part of the tables that HTTP/2 compresses headers with.
            value.set_sensitive(true);
            Some((name, value))
        });
        Self {
            headers: headers.collect(),
            masker: OnceLock::new(),
        }
    }
}

impl Applied {
    fn prepared(&self) -> &Prepared {
        &self.rules.prepared[self.index]
    }

    fn rule(&self) -> &InjectionRule {
        &self.rules.rules()[self.index]
    }

    /// How logs name the rule.
    pub(super) fn name(&self) -> &str {
        &self.rule().name
    }

    /// Sets the headers of the rule on a request, instead of those of the same name.
    pub(super) fn set(&self, headers: &mut HeaderMap) {
        let ours = &self.prepared().headers;
        let sets = |name: &HeaderName| match self.rule().set {
            HeaderChoice::All => true,
            HeaderChoice::Present => headers.contains_key(name),
        };
        let mut chosen: Vec<&(HeaderName, HeaderValue)> = ours.iter().filter(|(name, _)| sets(name)).collect();
        if chosen.is_empty() {
            chosen.extend(ours.first());
        }
        let mut replaced = HashSet::new();
        for (name, value) in chosen {
            if replaced.insert(name) {
                headers.insert(name, value.clone());
            } else {
                headers.append(name, value.clone());
            }
        }
    }

    /// Whether the rule has a header of this name. Trailers of requests must not have it: some servers treat them as
    /// headers.
    pub(super) fn has_header(&self, name: &HeaderName) -> bool {
        self.prepared().headers.iter().any(|(own, _)| own == name)
    }

    /// What hides the secrets of the rule in answers.
    pub(super) fn masker(&self) -> &Arc<Masker> {
        self.prepared().masker.get_or_init(|| {
            let rule = self.rule();
            let headers = rule.headers.iter().map(|header| header.value.expose());
            let secrets = rule.secrets.iter().map(model::secret::Secret::expose);
            Arc::new(Masker::new(secrets.chain(headers)))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use model::injection::InjectedHeader;
    use model::secret::Secret;

    use super::*;

    fn rule(name: &str, path: PathPattern) -> InjectionRule {
        InjectionRule {
            name: name.to_owned(),
            host: "a.example".parse().unwrap(),
            port: 443,
            path,
            if_headers: BTreeMap::new(),
            if_queries: BTreeMap::new(),
            headers: Vec::new(),
            set: HeaderChoice::All,
            secrets: Vec::new(),
        }
    }

    fn rules(rules: Vec<InjectionRule>) -> Arc<Rules> {
        Arc::new(Rules::new(Arc::new(EgressPolicy {
            interception: Some(Box::new(Interception {
                ca_seed: Secret::new("0".repeat(64)),
                rules,
            })),
            ..EgressPolicy::default()
        })))
    }

    fn chosen(rules: &Arc<Rules>, target: &str, headers: &HeaderMap) -> Option<String> {
        let (path, query) = match target.split_once('?') {
            Some((path, query)) => (path, Some(query)),
            None => (target, None),
        };
        let facts = Facts {
            host: "a.example",
            port: 443,
            path,
            query,
            headers,
        };
        Some(rules.choose(&facts)?.name().to_owned())
    }

    #[test]
    fn the_most_specific_path_wins_and_then_the_first() {
        let prefix = |text: &str| PathPattern::Prefix(text.to_owned());
        let exact = |text: &str| PathPattern::Exact(text.to_owned());
        let rules = rules(vec![
            rule("any", PathPattern::Any),
            rule("short", prefix("/v")),
            rule("long", prefix("/v1/")),
            rule("long again", prefix("/v1/")),
            rule("exact", exact("/v1/a")),
            rule("any again", PathPattern::Any),
        ]);
        for (path, want) in [
            ("/", "any"),
            ("/v", "short"),
            ("/v2", "short"),
            ("/v1/", "long"),
            ("/v1/b", "long"),
            ("/v1/a", "exact"),
            ("/v1/%61", "exact"),
            ("/v1/b/../a", "exact"),
            ("/v1/a/", "long"),
            ("/V1/a", "any"),
            ("/v1/../x", "any"),
            // What servers read in different ways is for no path in particular.
            ("/v1/..%2fx", "any"),
            ("/v1/..\\x", "any"),
            ("*", "any"),
        ] {
            assert_eq!(chosen(&rules, path, &HeaderMap::new()).as_deref(), Some(want), "{path}");
        }
    }

    #[test]
    fn conditions_are_about_the_first_value() {
        let mut headers = rule("headers", PathPattern::Any);
        headers.if_headers.insert("x-a".to_owned(), "1".to_owned());
        let mut queries = rule("queries", PathPattern::Any);
        queries.if_queries.insert("a b".to_owned(), "1+1".to_owned());
        queries.if_queries.insert("c".to_owned(), String::new());
        let rules = rules(vec![headers, queries]);
        let map = |values: &[&'static str]| {
            let mut map = HeaderMap::new();
            for value in values {
                map.append("X-A", HeaderValue::from_static(value));
            }
            map
        };
        for (target, values, want) in [
            ("/", &["1"][..], Some("headers")),
            ("/", &["1", "2"], Some("headers")),
            ("/", &["2", "1"], None),
            ("/", &["1 "], None),
            ("/", &[], None),
            ("/?a%20b=1%2b1&c", &[], Some("queries")),
            ("/?c=&a+b=1%2B1", &[], Some("queries")),
            ("/?a+b=1%2B1", &[], None),
            ("/?c&a+b=2&a+b=1%2B1", &[], None),
            ("/?c&A+b=1%2B1", &[], None),
            ("/?c&a+b=1%2B1%2", &[], None),
        ] {
            assert_eq!(
                chosen(&rules, target, &map(values)).as_deref(),
                want,
                "{target} {values:?}"
            );
        }
    }

    #[test]
    fn headers_of_the_client_are_replaced() {
        let header = |name: &str, value: &str| InjectedHeader {
            name: name.to_owned(),
            value: Secret::new(value.to_owned()),
        };
        let mut all = rule("all", PathPattern::Any);
        all.headers = vec![
            header("authorization", "Bearer ours"),
            header("x-api-key", "ours"),
            header("host", "b.example"),
            header("transfer-encoding", "chunked"),
            header("bad name", "x"),
            header("x-bad", "a\r\nb: c"),
        ];
        let mut present = all.clone();
        present.set = HeaderChoice::Present;
        let check = |rule: &InjectionRule, sent: &[(&'static str, &'static str)], want: &[(&str, &str)]| {
            let mut headers = HeaderMap::new();
            for (name, value) in sent {
                headers.append(*name, HeaderValue::from_static(value));
            }
            let rules = rules(vec![rule.clone()]);
            let applied = Applied { rules, index: 0 };
            applied.set(&mut headers);
            let mut have: Vec<_> = headers
                .iter()
                .map(|(name, value)| (name.as_str(), value.to_str().unwrap()))
                .collect();
            have.sort_unstable();
            assert_eq!(have, want, "{sent:?}");
        };
        let both = [("authorization", "Bearer ours"), ("x-api-key", "ours")];
        check(&all, &[], &both);
        check(&all, &[("authorization", "a"), ("Authorization", "b")], &both);
        check(&present, &[], &both[..1]);
        check(&present, &[("x-api-key", "a")], &both[1..]);
        check(&present, &[("x-api-key", "a"), ("authorization", "b")], &both);
    }
}
