//! Precedence, types, and what errors say and do not say.

use std::io::Write as _;
use std::path::Path;

use proxy::egress::EgressSettings;
use runtime::settings::CriuChoice;
use server::settings::{BUCKET_MAX, PauseAnswer, TeamLimits};

use super::keys::{Key, Kind};
use super::*;
use crate::tls::{Files, Https};

/// Config from flags, variables and a file.
fn resolve(flags: &[(&'static Key, &str)], env: &[(&str, &str)], file: Option<&str>) -> Result<Config, ConfigError> {
    let mut written = tempfile::NamedTempFile::new().unwrap();
    written.write_all(file.unwrap_or_default().as_bytes()).unwrap();
    Sources {
        flags: flags.iter().map(|&(key, value)| (key, value.to_owned())).collect(),
        config: file.map(|_| written.path().to_owned()),
        env: env
            .iter()
            .map(|&(name, value)| (name.to_owned(), value.to_owned()))
            .collect(),
    }
    .resolve()
}

#[test]
fn defaults_are_what_the_table_says() {
    let config = resolve(&[], &[], None).unwrap();
    assert_eq!(config.data_dir, Path::new(keys::DATA_DIR.default));
    assert_eq!(config.listen.to_string(), keys::LISTEN.default);
    assert_eq!(config.domain_at(3000), "sandbox.localhost:3000");
    assert_eq!(config.database_url.expose(), "sqlite:/var/lib/ringfence/ringfence.db");
    assert!(config.has_own_database());
    assert_eq!(config.node.driver.base.to_string(), keys::BASE_TEMPLATE.default);
    assert_eq!(config.node.driver.unlimited.to_string(), keys::UNLIMITED.default);
    assert_eq!(config.pause.at_shutdown.to_string(), keys::PAUSE_AT_SHUTDOWN.default);
    assert_eq!(config.pause.copies.to_string(), keys::PAUSE_COPIES.default);
    assert_eq!(
        (config.pause.answer, keys::PAUSE_ANSWER.default),
        (PauseAnswer::Durable, "durable")
    );
    assert_eq!(config.node.driver.page_out.to_string(), keys::PAUSE_PAGE_OUT.default);
    assert!(config.limits.teams.is_empty());
    let limits = config.limits.default;
    assert_eq!(limits.max_lifetime_s.to_string(), keys::SANDBOX_MAX_LIFETIME_S.default);
    for (value, key) in [
        (limits.sandboxes, keys::LIMITS_SANDBOXES),
        (limits.cpu_count, keys::LIMITS_CPU_COUNT),
        (limits.memory_mb, keys::LIMITS_MEMORY_MB),
        (limits.creates_per_minute, keys::LIMITS_CREATES_PER_MINUTE),
        (limits.requests_per_second, keys::LIMITS_REQUESTS_PER_SECOND),
        (limits.paused_disk_mb, keys::LIMITS_PAUSED_DISK_MB),
        (limits.template_disk_mb, keys::LIMITS_TEMPLATE_DISK_MB),
        (config.capacity.max_sandboxes, keys::CAPACITY_MAX_SANDBOXES),
        (config.pause.retention_s, keys::PAUSE_RETENTION_S),
        (config.pause.copy_mib_per_s, keys::PAUSE_COPY_MIB_PER_S),
    ] {
        assert_eq!((value, key.default), (None, "0"), "{}", key.name);
    }
    for (value, key) in [
        (config.capacity.memory_floor_mb, keys::CAPACITY_MEMORY_FLOOR_MB),
        (config.capacity.disk_floor_mb, keys::CAPACITY_DISK_FLOOR_MB),
        (config.records.log_retention_s, keys::LOGS_RETENTION_S),
        (config.records.log_entries, keys::LOGS_MAX_ENTRIES),
        (config.records.metric_retention_s, keys::METRICS_RETENTION_S),
        (config.records.event_retention_s, keys::EVENTS_RETENTION_S),
        (config.webhooks.per_team, keys::WEBHOOKS_MAX_PER_TEAM),
        (limits.builds, keys::LIMITS_BUILDS),
        (limits.template_cpu_count, keys::LIMITS_TEMPLATE_CPU_COUNT),
        (limits.template_memory_mb, keys::LIMITS_TEMPLATE_MEMORY_MB),
        (config.pool.per_template, keys::POOL_PER_TEMPLATE),
        (config.pool.total, keys::POOL_TOTAL),
        (config.pool.memory_mb, keys::POOL_MEMORY_MB),
        (config.builds.concurrent, keys::BUILDS_CONCURRENT),
        (config.builds.file_age_s, keys::BUILDS_FILE_AGE_S),
        (config.builds.cache_age_s, keys::BUILDS_CACHE_AGE_S),
    ] {
        assert_eq!(value.to_string(), key.default, "{}", key.name);
    }
    for (bytes, key) in [
        (config.builds.file_bytes, keys::BUILDS_FILE_MB),
        (config.builds.team_files_bytes, keys::BUILDS_TEAM_FILES_MB),
        (config.builds.cache_bytes, keys::BUILDS_CACHE_MB),
    ] {
        assert_eq!((bytes >> 20).to_string(), key.default, "{}", key.name);
    }
    assert_eq!((config.records.log_bytes / 1024).to_string(), keys::LOGS_MAX_KB.default);
    for (value, key) in [
        (config.connections.total, keys::SERVER_CONNECTIONS),
        (config.connections.per_peer, keys::SERVER_CONNECTIONS_PER_PEER),
        (config.connections.per_sandbox, keys::SERVER_CONNECTIONS_PER_SANDBOX),
    ] {
        assert_eq!(value.to_string(), key.default, "{}", key.name);
    }
    assert!(config.connections.shared_peers.is_empty());
    let egress = config.egress;
    assert_eq!(egress, EgressSettings::default());
    assert_eq!(egress.enabled.to_string(), keys::EGRESS_ENABLED.default);
    assert_eq!((egress.default_allow, keys::EGRESS_DEFAULT.default), (true, "allow"));
    for (value, key) in [
        (egress.limits.connections, keys::EGRESS_CONNECTIONS),
        (egress.limits.connections_per_s, keys::EGRESS_CONNECTIONS_PER_S),
        (egress.limits.dns_queries_per_s, keys::EGRESS_DNS_QUERIES_PER_S),
        (egress.limits.bandwidth_mbit, keys::EGRESS_BANDWIDTH_MBIT),
        (egress.limits.udp_flows, keys::EGRESS_UDP_FLOWS),
        (egress.limits.intercepted, keys::EGRESS_INTERCEPTED),
        (egress.limits.requests_per_s, keys::EGRESS_REQUESTS_PER_S),
    ] {
        assert_eq!(value.to_string(), key.default, "{}", key.name);
    }
    assert_eq!((egress.mask_bytes / 1024).to_string(), keys::EGRESS_MASK_KB.default);
    assert_eq!(config.egress_ca_file, None);
    for (value, key) in [
        (config.resources.cpu_count, keys::SANDBOX_CPU_COUNT),
        (config.resources.memory_mb, keys::SANDBOX_MEMORY_MB),
        (config.resources.disk_mb, keys::SANDBOX_DISK_MB),
        (config.resources.pids, keys::SANDBOX_PIDS),
    ] {
        assert_eq!(value.to_string(), key.default, "{}", key.name);
    }
}

#[test]
fn a_default_of_the_table_is_that_of_the_field_that_it_sets() {
    for key in keys::ALL
        .iter()
        .filter(|key| matches!(key.kind, Kind::Integer | Kind::Boolean))
    {
        let default = resolve(&[], &[], None).unwrap();
        // Some defaults are a description.
        if let Ok(set) = resolve(&[(key, key.default)], &[], None) {
            assert_eq!(format!("{set:?}"), format!("{default:?}"), "{}", key.name);
        }
    }
}

#[test]
fn an_unknown_isolation_is_refused_with_what_there_is() {
    let error = resolve(&[(keys::SANDBOX_ISOLATION, "microvm")], &[], None).unwrap_err();
    let shown = error.to_string();
    assert!(
        shown.contains("sandbox.isolation") && shown.contains("must be container"),
        "{shown}"
    );
}

#[test]
fn criu_is_found_turned_off_or_named() {
    let of = |text| resolve(&[], &[("RINGFENCE_PAUSE_CRIU", text)], None).map(|config| config.node.driver.criu);
    assert_eq!(resolve(&[], &[], None).unwrap().node.driver.criu, CriuChoice::Auto);
    assert_eq!(of("auto").unwrap(), CriuChoice::Auto);
    assert_eq!(of("off").unwrap(), CriuChoice::Off);
    assert_eq!(of("/opt/criu").unwrap(), CriuChoice::At("/opt/criu".into()));
    for word in ["none", "criu", "Off"] {
        let why = of(word).unwrap_err().to_string();
        assert!(
            why.contains("RINGFENCE_PAUSE_CRIU") && why.contains("auto, off or the path"),
            "{why}"
        );
    }
}

#[test]
fn a_flag_wins_over_the_environment_over_the_file_over_the_default() {
    let flag: &[(&'static Key, &str)] = &[(keys::LISTEN, "127.0.0.1:1")];
    let env: &[(&str, &str)] = &[("RINGFENCE_LISTEN", "127.0.0.1:2")];
    let file = Some("listen = \"127.0.0.1:3\"");
    for (flags, env, file, port) in [
        (flag, env, file, 1),
        (&[], env, file, 2),
        (&[], &[], file, 3),
        (&[], &[], None, 3000),
    ] {
        assert_eq!(resolve(flags, env, file).unwrap().listen.port(), port);
    }
}

#[test]
fn every_key_can_be_set_by_file_and_by_environment() {
    for key in keys::ALL {
        let (text, quoted) = match key.kind {
            // The only value with which others are accepted.
            Kind::Boolean if key.name == "acme.accept_terms" => ("true", "true".to_owned()),
            Kind::Boolean => ("false", "false".to_owned()),
            Kind::Integer if key.name == "repositories.clone_timeout_s" => ("50", "50".to_owned()),
            Kind::Integer => ("64", "64".to_owned()),
            Kind::Number => ("0.25", "0.25".to_owned()),
            Kind::Hosts => (
                "a.b=10.0.0.1,a.b=::1,c=10.0.0.2",
                "{ 'a.b' = ['10.0.0.1', '::1'], c = '10.0.0.2' }".to_owned(),
            ),
            Kind::Text => {
                let text = match key.name {
                    "listen" | "metrics_listen" | "nodes.listen" => "[::1]:80",
                    "nodes.address" => "https://a.test:3100",
                    "nodes.servers" => "https://a.test:3100,https://[::1]:3100",
                    "mcp.path" => "/x/mcp",
                    "log_format" => "json",
                    "log_level" => "warn,node=debug",
                    "database_url" => "postgres://u:p@h/d",
                    "server.shared_peers" => "10.0.0.0/8,::1",
                    "sandbox.disk_reserve" => "full",
                    "pause.answer" => "frozen",
                    "pause.criu" => "/x",
                    "egress.default" => "deny",
                    "egress.allow_private" | "egress.deny" | "webhooks.allow_private" | "webhooks.deny" => {
                        "10.0.0.0/8,fd00::1"
                    }
                    "acme.directory" => "https://ca.test/dir",
                    "acme.contact" => "a@b.test",
                    "acme.dns_hook" => "/hook",
                    "egress.resolvers" => "127.0.0.1:5353,::1",
                    "builds.registry_ca_files" => "registry.test:5000=/ca.pem",
                    "builds.registry_mirrors" => "docker.io=mirror.test:5000",
                    "blobs.store" => "s3",
                    "blobs.endpoint" => "https://s3.test",
                    "blobs.secret_access_key_file" | "blobs.ca_file" => "/x",
                    "telemetry.otlp_endpoint" => "https://otlp.test",
                    "sandbox.isolation" => "container",
                    _ => "x",
                };
                (text, format!("{text:?}"))
            }
        };
        let file = match key.name.split_once('.') {
            Some((table, word)) => format!("[{table}]\n{word} = {quoted}\n"),
            None => format!("{} = {quoted}\n", key.name),
        };
        // Each file of a certificate requires the other, and ACME and a bucket what they cannot do without.
        let of_blobs = [
            ("RINGFENCE_BLOBS_STORE", "store = 's3'\n", "s3"),
            ("RINGFENCE_BLOBS_BUCKET", "bucket = 'b'\n", "b"),
            ("RINGFENCE_BLOBS_ACCESS_KEY_ID", "access_key_id = 'i'\n", "i"),
            (
                "RINGFENCE_BLOBS_SECRET_ACCESS_KEY_FILE",
                "secret_access_key_file = '/k'\n",
                "/k",
            ),
        ];
        let needed = [
            (
                "RINGFENCE_ACME_DIRECTORY",
                "directory = 'https://ca.test/dir'\n",
                "https://ca.test/dir",
            ),
            ("RINGFENCE_ACME_DNS_HOOK", "dns_hook = '/hook'\n", "/hook"),
            ("RINGFENCE_ACME_ACCEPT_TERMS", "accept_terms = true\n", "true"),
        ];
        let (file, partners) = match key.name {
            "tls_cert" => (format!("{file}tls_key = \"x\"\n"), vec![("RINGFENCE_TLS_KEY", "x")]),
            "tls_key" => (format!("{file}tls_cert = \"x\"\n"), vec![("RINGFENCE_TLS_CERT", "x")]),
            name if name.starts_with("telemetry.") && name != "telemetry.otlp_endpoint" => (
                format!("{file}otlp_endpoint = 'https://otlp.test'\n"),
                vec![("RINGFENCE_TELEMETRY_OTLP_ENDPOINT", "https://otlp.test")],
            ),
            name if name.starts_with("blobs.") => {
                let others: Vec<_> = of_blobs.into_iter().filter(|(env, ..)| *env != key.env()).collect();
                let lines: String = others.iter().map(|(_, line, _)| *line).collect();
                let values = others.iter().map(|(env, _, value)| (*env, *value));
                (format!("{file}{lines}"), values.collect())
            }
            name if name.starts_with("acme.") => {
                let others: Vec<_> = needed.into_iter().filter(|(env, ..)| *env != key.env()).collect();
                let lines: String = others.iter().map(|(_, line, _)| *line).collect();
                let values = others.iter().map(|(env, _, value)| (*env, *value));
                let domain = [("RINGFENCE_DOMAIN", "box.test")];
                (
                    format!("domain = 'box.test'\n{file}{lines}"),
                    domain.into_iter().chain(values).collect(),
                )
            }
            _ => (file, Vec::new()),
        };
        let by_file = format!("{:?}", resolve(&[], &[], Some(&file)).unwrap());
        let own = key.env();
        let env: Vec<_> = partners.into_iter().chain([(own.as_str(), text)]).collect();
        let by_env = format!("{:?}", resolve(&[], &env, None).unwrap());
        assert_eq!(by_file, by_env, "{}", key.name);
    }
}

#[test]
fn a_bucket_needs_all_of_its_keys_and_shows_no_secret() {
    const KEY: &str = "RINGFENCE_BLOBS_SECRET_ACCESS_KEY";
    let s3 = "[blobs]\nstore = 's3'\nbucket = 'b'\naccess_key_id = 'i'\n";
    let by_env = resolve(&[], &[(KEY, "the-key")], Some(s3)).unwrap();
    assert!(!format!("{by_env:?}").contains("the-key"));
    assert!(
        resolve(&[], &[], Some("[blobs]\nstore = 'local'\n"))
            .unwrap()
            .blobs
            .is_none()
    );
    let http = format!("{s3}endpoint = 'http://s3.test'\n");
    assert!(resolve(&[], &[(KEY, "k")], Some(&format!("{http}allow_http = true\n"))).is_ok());
    let no_bucket = "[blobs]\nstore = 's3'\naccess_key_id = 'i'\n";
    let both = format!("{s3}secret_access_key_file = '/k'\n");
    for (env, file, part) in [
        ("the-key", "[blobs]\nstore = 'disk'\n", "local or s3"),
        ("the-key", "[blobs]\nbucket = 'b'\n", "blobs.store"),
        ("the-key", no_bucket, "blobs.bucket"),
        ("", s3, "blobs.secret_access_key_file"),
        ("the-key", &both, "blobs.secret_access_key_file"),
        ("the key", s3, "one word"),
        ("the-key", &http, "blobs.allow_http"),
        ("the-key", &format!("{s3}prefix = '../b'\n"), "blobs.prefix"),
    ] {
        let env: &[(&str, &str)] = if env.is_empty() { &[] } else { &[(KEY, env)] };
        let error = resolve(&[], env, Some(file)).unwrap_err().to_string();
        assert!(error.contains(part), "{part}: {error}");
        assert!(!error.contains("the-key") && !error.contains("the key"), "{error}");
    }
}

#[test]
fn traces_need_a_receiver_that_others_cannot_listen_to() {
    assert!(resolve(&[], &[], None).unwrap().telemetry.is_none());
    let local = "[telemetry]\notlp_endpoint = 'http://127.0.0.1:4318'\n";
    for rest in [
        "",
        "sampling_ratio = 0.1\n",
        "sampling_ratio = 1\n",
        "otlp_headers_file = '/h'\n",
    ] {
        let config = resolve(&[], &[], Some(&format!("{local}{rest}"))).unwrap();
        assert!(config.telemetry.is_some(), "{rest}");
    }
    let far = "[telemetry]\notlp_endpoint = 'http://otlp.test'\n";
    assert!(resolve(&[], &[], Some(far)).is_ok());
    for (file, part) in [
        (&format!("{far}otlp_headers_file = '/h'\n"), "https://"),
        (&format!("{local}sampling_ratio = 1.5\n"), "from 0 to 1"),
        (&format!("{local}sampling_ratio = '0.5'\n"), "must be a number"),
        (&"[telemetry]\nca_file = '/c'\n".to_owned(), "telemetry.otlp_endpoint"),
        (
            &"[telemetry]\notlp_endpoint = 'https://u:secret@a'\n".to_owned(),
            "telemetry.otlp_endpoint",
        ),
    ] {
        let error = resolve(&[], &[], Some(file)).unwrap_err().to_string();
        assert!(error.contains(part) && !error.contains("secret"), "{part}: {error}");
    }
}

#[test]
fn errors_name_the_key_and_where_the_value_came_from() {
    let flag = resolve(&[(keys::LISTEN, "not-an-address")], &[], None);
    let env = resolve(&[], &[("RINGFENCE_SANDBOX_PIDS", "many")], None);
    for (outcome, parts) in [
        (flag, ["listen", "not-an-address", "flag --listen"]),
        (env, ["sandbox.pids", "many", "variable RINGFENCE_SANDBOX_PIDS"]),
    ] {
        let error = outcome.unwrap_err().to_string();
        for part in parts {
            assert!(error.contains(part), "{part}: {error}");
        }
    }
    for (file, parts) in [
        ("[pause]\nanswer = \"soon\"", ["pause.answer", "durable or frozen"]),
        ("[egress]\ndefault = \"open\"", ["egress.default", "allow or deny"]),
        ("[egress]\ndeny = \"10.0.0.0/40\"", ["egress.deny", "10.0.0.0/40"]),
        (
            "[egress]\nresolvers = \"dns\"",
            ["egress.resolvers", "address of a DNS server"],
        ),
        ("[egress]\nhosts = \"a=10.0.0.1\"", ["egress.hosts", "a table of names"]),
        ("[egress.hosts]\na = 1", ["egress.hosts", "a table of names"]),
        ("[egress.hosts]\n\"*.a\" = \"10.0.0.1\"", ["egress.hosts", "*.a"]),
        (
            "[egress]\nconnections = 0",
            ["egress.connections", "between 1 and 1000000"],
        ),
        (
            "[egress]\nconnections_per_s = 1000001",
            ["egress.connections_per_s", "between 1 and 1000000"],
        ),
        (
            "[egress]\nudp_flows = -1",
            ["egress.udp_flows", "between 0 and 1000000"],
        ),
        ("[sandbox]\npids = 0", ["sandbox.pids", "at least 32"]),
        ("[sandbox]\nopen_files = 63", ["sandbox.open_files", "64"]),
        ("[sandbox]\nopen_files = 524289", ["sandbox.open_files", "524288"]),
        ("[sandbox]\npids = \"64\"", ["sandbox.pids", "an integer"]),
        ("listen = 3000", ["listen", "string in quotes"]),
        ("launchers = 65", ["launchers", "between 1 and 64"]),
        ("log_level = \"loud\"", ["log_level", "loud"]),
        ("domain = \"a b\"", ["domain", "a b"]),
        ("domain = \"a:0\"", ["domain", "port"]),
        (
            "[sandbox]\nmemory = 5",
            ["sandbox.memory", "did you mean sandbox.memory_mb?"],
        ),
        ("memory_mb = 5", ["memory_mb", "did you mean sandbox.memory_mb?"]),
        ("sandbox = 5", ["unknown key", "sandbox"]),
        ("a = 1\na = 2", ["configuration file", "line 2"]),
        ("listn = \"a:1\"", ["unknown key listn", "did you mean listen?"]),
        (
            "[pause]\ncrui = \"/c\"",
            ["unknown key pause.crui", "did you mean pause.criu?"],
        ),
        (
            "[limits]\nsandbox = 5",
            ["unknown key limits.sandbox", "did you mean limits.sandboxes?"],
        ),
        (
            "\nlisten = 127.0.0.1:3000",
            ["line 2", "the value of listen must be in quotes: listen = \"…\""],
        ),
        (
            "domain = example.com",
            ["line 1", "the value of domain must be in quotes"],
        ),
        (
            "[sandbox]\nmemory_mb = two",
            ["line 2", "sandbox.memory_mb must be an integer"],
        ),
        ("base_template = yes", ["line 1", "base_template must be true or false"]),
        (
            "[limits]\nrequests_per_second = 1000001",
            ["limits.requests_per_second", "between 0 and 1000000"],
        ),
        ("[limits]\nsandboxes = -1", ["limits.sandboxes", "-1"]),
        ("[logs]\nmax_entries = 0", ["logs.max_entries", "at least 1"]),
        ("[logs]\nmax_kb = 15", ["logs.max_kb", "at least 16"]),
        ("[logs]\nretention_s = -1", ["logs.retention_s", "-1"]),
        ("[metrics]\nretention_s = -1", ["metrics.retention_s", "-1"]),
        ("team = 5", ["unknown key", "team"]),
        ("team.a = 5", ["unknown key", "team.a"]),
        (
            "[team.a]\nsandboxes = 5",
            ["unknown key team.a.sandboxes", "did you mean limits.sandboxes?"],
        ),
        ("[team.a]\nlisten = \"a:1\"", ["unknown key", "team.a.listen"]),
        (
            "[team.a.limits]\nsandboxes = \"5\"",
            ["team.a.limits.sandboxes", "an integer"],
        ),
        (
            "[team.\"a b\".sandbox]\nmax_lifetime_s = 0",
            ["team.a b.sandbox.max_lifetime_s", "at least 1"],
        ),
    ] {
        let error = resolve(&[], &[], Some(file)).unwrap_err().to_string();
        for part in parts {
            assert!(error.contains(part), "{file}: {part}: {error}");
        }
    }
}

#[test]
fn a_missing_file_is_an_error_that_names_it() {
    let sources = Sources {
        config: Some(PathBuf::from("/nonexistent/ringfence.toml")),
        ..Sources::default()
    };
    let error = sources.resolve().unwrap_err().to_string();
    assert!(error.contains("/nonexistent/ringfence.toml"), "{error}");
}

#[test]
fn the_password_of_a_database_is_never_shown() {
    let secret = "hunter2";
    let good = resolve(&[], &[("RINGFENCE_DATABASE_URL", "postgres://u:hunter2@h/d")], None).unwrap();
    assert!(!format!("{good:?}").contains(secret));
    for file in [
        "database_url = \"mysql://u:hunter2@h/d\"",
        "database_url = postgres://u:hunter2@h/d",
        "database_url = \"postgres://u:hunter2@h/d",
    ] {
        let error = resolve(&[], &[], Some(file)).unwrap_err();
        assert!(!format!("{error} {error:?}").contains(secret), "{error}");
    }
}

#[test]
fn a_team_has_its_own_limits_and_the_common_ones_where_it_has_none() {
    let file = "[limits]\nsandboxes = 10\nmemory_mb = 4096\nrequests_per_second = 1000000\n\
                [team.research.limits]\nsandboxes = 50\nmemory_mb = 0\n\
                [team.research.sandbox]\nmax_lifetime_s = 60\n[team.idle]\n\
                [team.open.egress]\ndefault = \"allow\"\n[team.shut.egress]\ndefault = \"deny\"\n";
    let env = [("RINGFENCE_LIMITS_CPU_COUNT", "8")];
    let limits = resolve(&[], &env, Some(file)).unwrap().limits;
    let default = TeamLimits {
        sandboxes: Some(10),
        cpu_count: Some(8),
        memory_mb: Some(4096),
        requests_per_second: Some(BUCKET_MAX),
        ..TeamLimits::default()
    };
    assert_eq!(limits.default, default);
    let research = TeamLimits {
        sandboxes: Some(50),
        memory_mb: None,
        max_lifetime_s: 60,
        ..default
    };
    assert_eq!(limits.of("research"), research);
    assert_eq!(limits.of("idle"), default);
    assert_eq!(limits.of("another"), default);
    let egress = ["research", "open", "shut"].map(|team| limits.of(team).egress_default_allow);
    assert_eq!(egress, [None, Some(true), Some(false)]);
    let error = resolve(&[], &[], Some("[team.x.egress]\ndefault = \"closed\"\n")).unwrap_err();
    assert!(error.to_string().contains("team.x.egress.default"), "{error}");
}

#[test]
fn unknown_variables_with_our_prefix_are_reported() {
    let env = [
        ("RINGFENCE_LISTN", "x"),
        ("RINGFENCE_ACCESS_KEY", "x"),
        ("RINGFENCE_SANDBOX_PIDS", "64"),
        ("E2B_API_KEY", "x"),
    ];
    assert_eq!(resolve(&[], &env, None).unwrap().unknown_env, ["RINGFENCE_LISTN"]);
}

#[test]
fn https_is_asked_for_or_meant() {
    let files = [(keys::TLS_CERT, "/c"), (keys::TLS_KEY, "/k")];
    let given = Https::Files(Files {
        certificates: "/c".into(),
        key: "/k".into(),
    });
    let https = |flags: &[_]| resolve(flags, &[], None).map(|config| config.https);
    assert_eq!(https(&[]).unwrap(), Https::Off);
    assert_eq!(https(&[(keys::TLS, "true")]).unwrap(), Https::Local);
    assert_eq!(https(&files).unwrap(), given);
    assert_eq!(https(&[files[0], files[1], (keys::TLS, "true")]).unwrap(), given);
    assert_eq!(https(&[files[0], files[1], (keys::TLS, "false")]).unwrap(), Https::Off);
    for (one, other) in [(files[0], "tls_key"), (files[1], "tls_cert")] {
        let error = https(&[one, (keys::TLS, "true")]).unwrap_err().to_string();
        assert!(error.contains(other), "{error}");
    }
}

#[test]
fn acme_needs_a_domain_a_hook_and_consent() {
    use crate::tls::acme::{Acme, Hook};
    let domain = "domain = 'box.example.com:8443'\n";
    let least = "directory = 'https://ca.test/dir'\ndns_hook = '/hook'\naccept_terms = true\n";
    let https = |file: &str| resolve(&[], &[], Some(file)).map(|config| config.https);
    let acme = |text: &str| https(&format!("{domain}[acme]\n{text}"));
    let seconds = std::time::Duration::from_secs;
    let mut want = Acme {
        directory: "https://ca.test/dir".to_owned(),
        contact: Vec::new(),
        domains: vec!["box.example.com".to_owned(), "*.box.example.com".to_owned()],
        hook: Hook {
            path: "/hook".into(),
            timeout: seconds(120),
        },
        dns_wait: seconds(30),
        ca: None,
    };
    assert_eq!(acme(least).unwrap(), Https::Acme(Box::new(want.clone())));
    assert_eq!(
        https(&format!("tls = true\n{domain}[acme]\n{least}")).unwrap(),
        Https::Acme(Box::new(want.clone()))
    );
    assert_eq!(
        https(&format!("tls = false\n{domain}[acme]\n{least}")).unwrap(),
        Https::Off
    );
    want.contact = vec!["a@b.test".to_owned(), "c+d@e.test".to_owned()];
    want.domains = vec!["a.test".to_owned(), "*.b.test".to_owned()];
    want.hook.timeout = seconds(3600);
    want.dns_wait = seconds(0);
    want.ca = Some("/ca.pem".into());
    let more = "contact = 'a@b.test, c+d@e.test'\ndomains = 'A.test,*.B.test,a.test'\ndns_hook_timeout_s = 3600\n\
                dns_wait_s = 0\nca = '/ca.pem'\n";
    assert_eq!(acme(&format!("{least}{more}")).unwrap(), Https::Acme(Box::new(want)));

    for (text, said) in [
        ("dns_hook = '/hook'", "acme.dns_hook: requires acme.directory"),
        ("accept_terms = true", "acme.accept_terms: requires acme.directory"),
        ("directory = 'https://ca.test/dir'", "requires acme.dns_hook"),
        (
            "directory = 'https://ca.test/dir'\ndns_hook = '/hook'",
            "requires acme.accept_terms",
        ),
        ("directory = 'http://ca.test/dir'", "HTTPS address"),
        ("directory = 'https://me:secret@ca.test/dir'", "HTTPS address"),
        ("directory = 'ca.test'", "HTTPS address"),
        (&format!("{least}contact = 'me'"), "not a mail address"),
        (
            &format!("{least}contact = 'a@b.test?cc=d@e.test'"),
            "not a mail address",
        ),
        (&format!("{least}domains = 'a.test:1'"), "port"),
        (&format!("{least}domains = '*.*.test'"), "not a domain name"),
        (&format!("{least}domains = '{}'", vec!["a.test"; 101].join(",")), ""),
        (&format!("{least}dns_wait_s = 3601"), "between 0 and 3600"),
        (&format!("{least}dns_hook_timeout_s = 0"), "between 1 and 3600"),
        (&least.replace("/hook", "hook"), "absolute"),
    ] {
        // Names that are given twice count once.
        let Err(error) = acme(text) else {
            assert_eq!(said, "", "{text}");
            continue;
        };
        let error = error.to_string();
        assert!(
            error.contains(said) && !said.is_empty() && !error.contains("secret"),
            "{text}: {error}"
        );
    }
    for (count, fits) in [(100, true), (101, false)] {
        let names: Vec<String> = (0..count).map(|at| format!("n{at}.test")).collect();
        assert_eq!(
            acme(&format!("{least}domains = '{}'", names.join(","))).is_ok(),
            fits,
            "{count}"
        );
    }
    let error = https(&format!("[acme]\n{least}")).unwrap_err().to_string();
    assert!(error.contains("acme.directory: requires domain"), "{error}");
    let both = format!("tls_cert = '/c'\ntls_key = '/k'\n{domain}[acme]\n{least}");
    let error = https(&both).unwrap_err().to_string();
    assert!(error.contains("cannot be set together with tls_cert"), "{error}");
}

#[test]
fn domains_are_used_as_written() {
    for (text, want) in [
        ("Sandbox.Example.COM", Some("sandbox.example.com")),
        ("box.example.com:8443", Some("box.example.com:8443")),
        ("localhost", Some("localhost")),
        ("", None),
        (".a", None),
        ("a..b", None),
        ("http://a", None),
        ("a_b", None),
        ("a:99999", None),
    ] {
        let found = resolve(&[(keys::DOMAIN, text)], &[], None);
        assert_eq!(found.ok().map(|config| config.domain_at(1)).as_deref(), want, "{text}");
    }
}

#[test]
fn the_reference_names_every_key() {
    let reference = reference::reference();
    for key in keys::ALL {
        assert!(
            reference.contains(key.name) && reference.contains(&key.env()),
            "{}",
            key.name
        );
    }
}

#[test]
fn records_are_bounded_as_the_file_says() {
    let file = "[logs]\nretention_s = 0\nmax_entries = 1\nmax_kb = 16\n[metrics]\nretention_s = 0";
    let env = [("RINGFENCE_METRICS_RETENTION_S", "4294967295")];
    let records = resolve(&[], &env, Some(file)).unwrap().records;
    assert_eq!(
        (
            records.log_retention_s,
            records.log_entries,
            records.log_bytes,
            records.metric_retention_s
        ),
        (0, 1, 16_384, u32::MAX)
    );
}

#[test]
fn the_page_of_the_configuration_has_every_key_and_no_other() {
    let page = include_str!("../../../../docs/configuration.md");
    for key in keys::ALL {
        let flag = key.flag.map(|flag| format!("`{flag}` ")).unwrap_or_default();
        let row = format!("| `{}` | {flag}| `{}` |", key.name, key.env());
        assert!(page.contains(&row), "docs/configuration.md lacks the row: {row}");
    }
    for row in page.lines().filter_map(|line| line.strip_prefix("| `")) {
        let name = row.split('`').next().unwrap();
        if row.contains("| `RINGFENCE_") {
            assert!(keys::ALL.iter().any(|key| key.name == name), "{name} is no key");
        }
    }
}
