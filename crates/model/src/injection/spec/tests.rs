use proptest::prelude::*;
use serde_json::json;

use super::*;

fn injection(value: serde_json::Value) -> Injection {
    serde_json::from_value(value).expect("an injection")
}

fn rules(value: serde_json::Value) -> Result<Vec<InjectionRule>, InvalidInjection> {
    injection(value).rules(&Providers::default(), "rule_1")
}

type Shown = (String, u16, PathPattern, Vec<(String, String)>);

/// Host, port, path, and headers of the rules.
fn shown(value: serde_json::Value) -> Vec<Shown> {
    let rules = rules(value).expect("valid");
    let rules = rules.into_iter().map(|rule| {
        let headers = rule.headers.into_iter();
        let headers = headers.map(|header| (header.name, header.value.expose().to_owned()));
        (rule.host.as_str().to_owned(), rule.port, rule.path, headers.collect())
    });
    rules.collect()
}

fn header(name: &str, value: &str) -> (String, String) {
    (name.to_owned(), value.to_owned())
}

#[test]
fn providers_have_default_hosts_and_headers() {
    for (kinds, host, headers) in [
        (
            ["provider_a", "openai"],
            "api.openai.com",
            vec![header("authorization", "Bearer sk-1")],
        ),
        (
            ["provider_b", "anthropic"],
            "api.anthropic.com",
            vec![header("x-api-key", "sk-1")],
        ),
        (
            ["provider_c", "gemini"],
            "generativelanguage.googleapis.com",
            vec![header("x-goog-api-key", "sk-1")],
        ),
        (
            ["provider_own", "qiniu"],
            "api.qnaigc.com",
            vec![header("authorization", "Bearer sk-1"), header("x-api-key", "sk-1")],
        ),
    ] {
        for kind in kinds {
            let one = shown(json!({"type": kind, "api_key": "sk-1"}));
            assert_eq!(
                one,
                [(host.to_owned(), 443, PathPattern::Any, headers.clone())],
                "{kind}"
            );
            let url = "gateway.example.com:8443/v1/*";
            let one = shown(json!({"type": kind, "api_key": "sk-1", "base_url": url}));
            let path = PathPattern::Prefix("/v1/".to_owned());
            assert_eq!(
                one,
                [("gateway.example.com".to_owned(), 8443, path, headers.clone())],
                "{kind}"
            );
        }
    }
    let own = rules(json!({"type": "qiniu", "api_key": "sk-1"})).expect("valid");
    assert_eq!(own[0].set, HeaderChoice::Present);
}

#[test]
fn a_code_host_has_two_hosts_and_no_other() {
    let git = header("authorization", "Basic eC1hY2Nlc3MtdG9rZW46Z2hwXzE=");
    let api = header("authorization", "Bearer ghp_1");
    for kind in ["code_host", "github"] {
        let both = shown(json!({"type": kind, "token": "ghp_1"}));
        let want = [("github.com", &git), ("api.github.com", &api)]
            .map(|(host, header)| (host.to_owned(), 443, PathPattern::Any, vec![header.clone()]));
        assert_eq!(both, want);
        let one = shown(json!({"type": kind, "token": "ghp_1", "base_url": "https://github.com/owner/*"}));
        let path = PathPattern::Prefix("/owner/".to_owned());
        assert_eq!(one, [("github.com".to_owned(), 443, path, vec![git.clone()])]);
        let other = rules(json!({"type": kind, "token": "ghp_1", "base_url": "https://gist.github.com"}));
        assert!(matches!(other, Err(InvalidInjection::Host { .. })), "{other:?}");
    }
}

#[test]
fn headers_of_http_are_set_and_hidden() {
    let all = rules(json!({
        "type": "http",
        "base_url": "https://httpbin.example.com/bearer",
        "headers": {"Authorization": "Bearer secret-token", "X-Env": "prod", "X-Basic": "Basic dXNlcjpwYXNzd29yZDE="},
        "if_headers": {"X-Tenant": "a"},
        "if_queries": {"Tenant": "b"},
    }))
    .expect("valid");
    let [rule] = &all[..] else { panic!("one rule") };
    assert_eq!(rule.name, "rule_1");
    assert_eq!(rule.if_headers, [header("x-tenant", "a")].into());
    assert_eq!(rule.if_queries, [header("Tenant", "b")].into());
    let hidden: Vec<&str> = rule.secrets.iter().map(Secret::expose).collect();
    let want = [
        "Bearer secret-token",
        "secret-token",
        "Basic dXNlcjpwYXNzd29yZDE=",
        "dXNlcjpwYXNzd29yZDE=",
        "password1",
    ];
    assert_eq!(hidden, want);
    // Neither headers nor conditions are required.
    assert_eq!(shown(json!({"type": "http", "base_url": "a.b"}))[0].3, []);
}

#[test]
fn invalid_injections_are_refused() {
    let many: BTreeMap<String, String> = (0..21).map(|n| header(&format!("x-{n}"), "valuevalue")).collect();
    let url = "https://a.b";
    for (value, why) in [
        (json!({"type": "nobody"}), "type: \"nobody\" is unknown"),
        (json!({"type": "id"}), "type: \"id\" is unknown"),
        (json!({"type": "http"}), "base_url: type http requires it"),
        (json!({"type": "openai"}), "api_key: type openai requires it"),
        (json!({"type": "github"}), "token: type github requires it"),
        (
            json!({"type": "openai", "token": "x"}),
            "token: type openai does not have it",
        ),
        (
            json!({"type": "github", "token": "x", "api_key": "x"}),
            "api_key: type github does not",
        ),
        (
            json!({"type": "github", "token": "x", "headers": {}}),
            "headers: type github does not",
        ),
        (
            json!({"type": "http", "base_url": url, "api_key": "x"}),
            "api_key: type http does not",
        ),
        (
            json!({"type": "http", "base_url": "http://a.b"}),
            "base_url: it must begin with https://",
        ),
        (
            json!({"type": "openai", "api_key": "x", "base_url": ""}),
            "base_url: its host",
        ),
        (json!({"type": "openai", "api_key": ""}), "api_key: the value must"),
        (
            json!({"type": "openai", "api_key": "a\r\nb: c"}),
            "api_key: the value must",
        ),
        (json!({"type": "openai", "api_key": " a"}), "api_key: the value must"),
        (
            json!({"type": "openai", "api_key": "x".repeat(8193)}),
            "api_key: the value must",
        ),
        (
            json!({"type": "openai", "api_key": "sk-l****"}),
            "api_key: this is the masked",
        ),
        (
            json!({"type": "http", "base_url": url, "headers": {"a b": "c"}}),
            "headers: \"a b\" is not",
        ),
        (
            json!({"type": "http", "base_url": url, "headers": {":path": "c"}}),
            "headers: \":path\" is not",
        ),
        (
            json!({"type": "http", "base_url": url, "headers": {"HOST": "c"}}),
            "headers: \"HOST\" frames",
        ),
        (
            json!({"type": "http", "base_url": url, "headers": {"Content-Length": "1"}}),
            "headers: \"Content-Length\"",
        ),
        (
            json!({"type": "http", "base_url": url, "headers": {"A": "1", "a": "2"}}),
            "headers: \"a\" is there twice",
        ),
        (
            json!({"type": "http", "base_url": url, "headers": {"a": "b\n"}}),
            "headers.a: the value must",
        ),
        (
            json!({"type": "http", "base_url": url, "headers": many}),
            "headers: at most 20",
        ),
        (
            json!({"type": "http", "base_url": url, "if_headers": many}),
            "if_headers: at most 20",
        ),
        (
            json!({"type": "http", "base_url": url, "if_queries": many}),
            "if_queries: at most 20",
        ),
        (
            json!({"type": "http", "base_url": url, "if_headers": {"": "b"}}),
            "if_headers: \"\" is not",
        ),
        (
            json!({"type": "http", "base_url": url, "if_headers": {"A": "b", "a": "b"}}),
            "if_headers: \"a\" is there",
        ),
        (
            json!({"type": "http", "base_url": url, "if_queries": {"": "b"}}),
            "if_queries: a name",
        ),
        (
            json!({"type": "http", "base_url": url, "if_headers": {"a": "\0"}}),
            "if_headers.a: the value must",
        ),
    ] {
        let error = rules(value.clone()).expect_err(&value.to_string()).to_string();
        assert!(error.starts_with(why), "{value}: {error}");
        assert!(!error.contains("a\r\nb"), "{error}");
    }
}

#[test]
fn masks_show_the_beginning_of_long_secrets() {
    for (secret, want) in [
        ("sk-live-0123456789", "sk-l****"),
        ("ghp_12345678", "ghp_****"),
        ("short-secre", "****"),
        ("", "****"),
        ("ééééééééééééé", "éééé****"),
    ] {
        assert_eq!(mask(&Secret::new(secret.to_owned())), want);
    }
    let all = injection(json!({
        "type": "http",
        "base_url": "a.b",
        "headers": {"Authorization": "Bearer secret-token"},
        "if_headers": {"x": "y"},
    }));
    assert_eq!(all.masked(true), all);
    let masked = serde_json::to_value(all.masked(false)).expect("JSON");
    assert_eq!(masked["headers"], json!({"Authorization": "Bear****"}));
    assert_eq!(
        (&masked["base_url"], &masked["if_headers"]),
        (&json!("a.b"), &json!({"x": "y"}))
    );
    let key = injection(json!({"type": "openai", "api_key": "sk-live-0123456789"})).masked(true);
    assert_eq!(
        serde_json::to_value(key).expect("JSON"),
        json!({"type": "openai", "api_key": "sk-l****"})
    );
}

#[test]
fn items_are_references_or_injections() {
    for value in [
        json!([{"type": "id", "id": "rule_1"}]),
        json!([{"type": "openai", "api_key": "sk"}, {"type": "id", "id": "rule_1"}]),
    ] {
        let items: Vec<InjectionItem> = serde_json::from_value(value.clone()).expect("items");
        assert!(items.contains(&InjectionItem::Saved(SavedInjection::new("rule_1".to_owned()))));
        assert_eq!(serde_json::to_value(items).expect("JSON"), value);
    }
}

proptest! {
    #[test]
    fn any_injection_is_valid_or_refused(
        kind in "(http|openai|github|qiniu|id|\\PC{0,4})",
        base_url in proptest::option::of("(https://)?[a-c.]{1,5}(:[0-9]{1,5})?(/[a-c*%.]{0,6})?"),
        api_key in proptest::option::of("\\PC{0,6}"),
        token in proptest::option::of("[ -~\\n\\t]{0,6}"),
        headers in proptest::option::of(proptest::collection::btree_map("[A-Za-z :-]{0,4}", "[ -~\\n]{0,4}", 0..4)),
    ) {
        let secret = |text: Option<String>| text.map(Secret::new);
        let one = Injection {
            kind,
            base_url,
            headers: headers.map(|headers| headers.into_iter().map(|(name, value)| (name, Secret::new(value))).collect()),
            api_key: secret(api_key),
            token: secret(token),
            if_headers: None,
            if_queries: None,
        };
        for rule in one.rules(&Providers::default(), "r").unwrap_or_default() {
            for header in &rule.headers {
                prop_assert!(settable_name(&header.name) == Ok(header.name.clone()));
                prop_assert!(is_header_value(header.value.expose()));
            }
        }
        let text = serde_json::to_string(&one).expect("JSON");
        prop_assert_eq!(serde_json::from_str::<Injection>(&text).expect("the same"), one);
    }
}
