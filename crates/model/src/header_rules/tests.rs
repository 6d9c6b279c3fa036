use super::*;

fn spec(rules: &[(&str, &[(&str, &str)])]) -> RulesSpec {
    let rules = rules.iter().map(|(domain, headers)| {
        let headers = headers.iter();
        let headers = headers.map(|(name, value)| ((*name).to_owned(), Secret::new((*value).to_owned())));
        let transform = TransformSpec {
            headers: Some(headers.collect()),
        };
        let rule = RuleSpec {
            transform: Some(transform),
        };
        ((*domain).to_owned(), vec![rule])
    });
    rules.collect()
}

fn secrets(pairs: &[(&str, &str)]) -> BTreeMap<String, Secret> {
    let pairs = pairs.iter();
    pairs
        .map(|(name, value)| ((*name).to_owned(), Secret::new((*value).to_owned())))
        .collect()
}

fn texts(secrets: &[Secret]) -> Vec<&str> {
    secrets.iter().map(Secret::expose).collect()
}

#[test]
fn placeholders_become_the_values_of_secrets() {
    let rules = spec(&[(
        "API.Example.com",
        &[
            ("Authorization", "Bearer ${e2b.secrets.OpenAI-Key}"),
            ("X-Pair", "${e2b.secrets.a}:${e2b.secrets.b}"),
            ("X-Plain", "cost $5 ${other} {}"),
        ],
    )]);
    let rules = HeaderRules::parse(&rules).expect("rules");
    assert_eq!(
        rules.secrets().into_iter().collect::<Vec<_>>(),
        ["a", "b", "openai-key"]
    );
    let values = secrets(&[
        ("openai-key", "sk-1"),
        ("a", "A"),
        ("b", "${e2b.secrets.a}"),
        ("c", "C"),
    ]);
    let resolved = rules.resolve(&values);
    assert!(resolved.left_out.is_empty());
    let [rule] = &resolved.rules[..] else {
        panic!("{resolved:?}")
    };
    assert_eq!(rule.host.as_str(), "api.example.com");
    assert_eq!(
        (rule.port, &rule.path, rule.set),
        (443, &PathPattern::Any, HeaderChoice::All)
    );
    let set: Vec<(&str, &str)> = rule
        .headers
        .iter()
        .map(|h| (h.name.as_str(), h.value.expose()))
        .collect();
    // The value of a secret is not read for placeholders.
    let want = [
        ("authorization", "Bearer sk-1"),
        ("x-pair", "A:${e2b.secrets.a}"),
        ("x-plain", "cost $5 ${other} {}"),
    ];
    assert_eq!(set, want);
    let hidden = texts(&rule.secrets);
    assert_eq!(
        hidden,
        [
            "${e2b.secrets.a}",
            "A",
            "A:${e2b.secrets.a}",
            "cost $5 ${other} {}",
            "sk-1"
        ]
    );
}

#[test]
fn headers_without_their_secret_are_left_out() {
    let long = "x".repeat(RULE_HEADER_RESOLVED_MAX);
    let rules = spec(&[
        ("a.b", &[("x-a", "${e2b.secrets.gone}"), ("x-b", "kept")]),
        ("c.d", &[("x-c", "${e2b.secrets.gone}")]),
        ("e.f", &[("x-d", "-${e2b.secrets.long}")]),
    ]);
    let resolved = HeaderRules::parse(&rules)
        .expect("rules")
        .resolve(&secrets(&[("long", &long)]));
    let [rule] = &resolved.rules[..] else {
        panic!("{resolved:?}")
    };
    assert_eq!(rule.headers.len(), 1);
    assert_eq!(resolved.left_out.len(), 3);
    assert!(resolved.left_out.iter().filter(|why| why.contains("\"gone\"")).count() == 2);
    assert!(!format!("{resolved:?}").contains("kept"));
}

#[test]
fn exact_hosts_come_before_patterns() {
    let header: &[(&str, &str)] = &[("x-a", "1")];
    let rules = spec(&[
        ("*.b.example", header),
        ("*.a.b.example", header),
        ("x.a.b.example", header),
        ("none.example", &[]),
    ]);
    let resolved = HeaderRules::parse(&rules).expect("rules").resolve(&BTreeMap::new());
    let hosts: Vec<&str> = resolved.rules.iter().map(|rule| rule.host.as_str()).collect();
    assert_eq!(hosts, ["x.a.b.example", "*.a.b.example", "*.b.example"]);
}

#[test]
fn invalid_rules_are_named() {
    type Headers<'a> = &'a [(&'a str, &'a str)];
    type Row<'a> = (&'a [(&'a str, Headers<'a>)], &'a str);
    let ok: Headers<'_> = &[("x-a", "1")];
    let rows: &[Row<'_>] = &[
        (&[("*", ok)], "never for an address or for all hosts"),
        (&[("1.2.3.4", ok)], "\"1.2.3.4\""),
        (&[("10.0.0.0/8", ok)], "\"10.0.0.0/8\""),
        (&[("https://a.b", ok)], "\"https://a.b\""),
        (&[("A.b", ok), ("a.B", ok)], "twice"),
        (&[("a.b", &[("x-a", "1"), ("X-A", "2")])], "twice"),
        (&[("a.b", &[("", "1")])], "not the name"),
        (&[("a.b", &[("x a", "1")])], "not the name"),
        (&[("a.b", &[(":authority", "1")])], "not the name"),
        (&[("a.b", &[("Host", "1")])], "depends on it"),
        (&[("a.b", &[("Content-Length", "1")])], "depends on it"),
        (&[("a.b", &[("x-a", "1\r\nx-b: 2")])], "printable"),
        (&[("a.b", &[("x-a", "é")])], "printable"),
        (&[("a.b", &[("x-a", "${e2b.secrets.a")])], "closing brace"),
        (&[("a.b", &[("x-a", "${e2b.secrets.}")])], "${e2b.secrets.NAME}"),
        (&[("a.b", &[("x-a", "${e2b.other.a}")])], "${e2b.other.a}"),
        (
            &[("a.b", &[("x-a", "Bearer ${e2b.identity.tokens.aws}")])],
            "workload identity is not available",
        ),
    ];
    for (rules, want) in rows {
        let error = HeaderRules::parse(&spec(rules)).expect_err("an error").to_string();
        assert!(error.contains(want), "{error}");
    }
    let many: Vec<(String, String)> = (0..=RULE_SECRETS_MAX)
        .map(|n| (format!("x-{n}"), format!("${{e2b.secrets.s{n}}}")))
        .collect();
    let many: Vec<(&str, &str)> = many
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_str()))
        .collect();
    let error = HeaderRules::parse(&spec(&[("a.b", &many)])).expect_err("an error");
    assert_eq!(error, InvalidRules::Secrets(RULE_SECRETS_MAX + 1));
}

#[test]
fn text_of_headers_is_masked_and_placeholders_are_shown() {
    for (written, want) in [
        ("Bearer ${e2b.secrets.Key}", "Bearer ${e2b.secrets.Key}"),
        ("${e2b.secrets.a}", "${e2b.secrets.a}"),
        ("Bearer sk-0123456789", "Bearer sk-0****"),
        ("Basic dXNlcjpwYXNz", "Basic dXNl****"),
        ("token abc", "token ****"),
        ("sk-0123456789", "sk-0****"),
        ("short", "****"),
        ("", ""),
        ("user:hunter2hunter2${e2b.secrets.a}-x", "user****${e2b.secrets.a}****"),
        // Only at the beginning it is a scheme word.
        ("${e2b.secrets.a}bearer x", "${e2b.secrets.a}****"),
        ("${e2b.secrets.a", "****"),
    ] {
        let shown = shown(&spec(&[("a.b", &[("x-a", written)])]));
        let text = serde_json::to_value(&shown).expect("JSON");
        assert_eq!(text["a.b"][0]["transform"]["headers"]["x-a"], want, "{written}");
    }
}

#[test]
fn passwords_of_basic_credentials_are_hidden_as_well() {
    let rules = spec(&[("a.b", &[("authorization", "Basic dXNlcjpodW50ZXIyaHVudGVyMg==")])]);
    let resolved = HeaderRules::parse(&rules).expect("rules").resolve(&BTreeMap::new());
    let hidden = texts(&resolved.rules[0].secrets);
    assert_eq!(hidden, ["dXNlcjpodW50ZXIyaHVudGVyMg==", "hunter2hunter2"]);
}

#[test]
fn rules_without_headers_are_kept_as_written() {
    let text = r#"{"a.b":[{}],"c.d":[{"transform":{}}],"e.f":[]}"#;
    let rules: RulesSpec = serde_json::from_str(text).expect("rules");
    assert_eq!(serde_json::to_string(&shown(&rules)).expect("JSON"), text);
    let parsed = HeaderRules::parse(&rules).expect("rules");
    assert!(parsed.is_empty() && parsed.resolve(&BTreeMap::new()) == ResolvedRules::default());
}
