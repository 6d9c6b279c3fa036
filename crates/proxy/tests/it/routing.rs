//! Routing of requests to sandboxes, hostile hosts included.

use http::request::Parts;
use http::{Method, Request};
use proxy::ingress::route::{Api, BadRoute, Route, SignedFile, Target, is_control_path, route};

fn sandbox(id: &str, port: u16) -> Result<Route, BadRoute> {
    let id = id.parse().expect("an id");
    Ok(Route::Sandbox(Target { id, port }))
}

/// An API at `api.here.test` that takes whatever carries a key.
struct KeyedApi;

impl Api for KeyedApi {
    fn is_at(&self, host: &str) -> bool {
        host == "api.here.test"
    }

    fn takes(&self, request: &Parts) -> bool {
        request.headers.contains_key("x-api-key")
    }
}

fn routed(uri: &str, headers: &[(&str, &str)]) -> Result<Route, BadRoute> {
    let mut request = Request::builder().uri(uri);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    route(&request.body(()).expect("a request").into_parts().0, &KeyedApi)
}

#[test]
fn a_host_label_names_port_and_sandbox() {
    for (host, want) in [
        ("3000-iabc.example.com", sandbox("iabc", 3000)),
        ("3000-iabc.localhost:8080", sandbox("iabc", 3000)),
        ("3000-iabc-6532622b.localhost", sandbox("iabc", 3000)),
        ("49983-iabc-00000000.localhost.", sandbox("iabc", 49983)),
        ("3000-IABC.Example.Com", sandbox("iabc", 3000)),
        ("65535-iabc.x", sandbox("iabc", 65535)),
        ("007-iabc.x", sandbox("iabc", 7)),
        // No dot, no label; and labels that begin with no port are names of something else.
        ("3000-iabc", Ok(Route::Api)),
        ("3000-iabc:80", Ok(Route::Api)),
        ("localhost:3000", Ok(Route::Api)),
        ("127.0.0.1:3000", Ok(Route::Api)),
        ("[::1]:3000", Ok(Route::Api)),
        ("api.example.com", Ok(Route::Api)),
        ("api-1.example.com", Ok(Route::Api)),
        ("-iabc.example.com", Ok(Route::Api)),
        ("+80-iabc.example.com", Ok(Route::Api)),
        ("３000-iabc.example.com", Err(BadRoute::Host)),
        (".", Ok(Route::Api)),
        ("", Ok(Route::Api)),
        // Meant for a sandbox and wrong.
        ("0-iabc.x", Err(BadRoute::Port)),
        ("65536-iabc.x", Err(BadRoute::Port)),
        ("99999999999999999999-iabc.x", Err(BadRoute::Port)),
        ("3000-.x", Err(BadRoute::Id)),
        ("3000--iabc.x", Err(BadRoute::Id)),
        ("3000-i_abc.x", Err(BadRoute::Id)),
        ("3000-i/../abc.x", Err(BadRoute::Id)),
        ("3000-i%61bc.x", Err(BadRoute::Id)),
        ("3000-i abc.x", Err(BadRoute::Id)),
    ] {
        assert_eq!(routed("/", &[("host", host)]), want, "{host:?}");
    }
    let long = format!("3000-{}.x", "a".repeat(61));
    assert_eq!(routed("/", &[("host", &long)]), Err(BadRoute::Id));
}

#[test]
fn a_host_outside_ascii_is_refused() {
    let request = Request::get("/").header("host", &b"3000-iabc\xff.x"[..]);
    let parts = request.body(()).expect("a request").into_parts().0;
    assert_eq!(route(&parts, &KeyedApi), Err(BadRoute::Host));
}

#[test]
fn the_authority_of_the_target_goes_before_the_host_header() {
    let host = ("host", "4000-iother.x");
    assert_eq!(routed("http://3000-iabc.x/a", &[host]), sandbox("iabc", 3000));
    assert_eq!(routed("http://api.x/a", &[host]), Ok(Route::Api));
    assert_eq!(routed("/", &[host, ("host", "3000-iabc.x")]), Err(BadRoute::Host));
}

#[test]
fn routing_headers_work_on_any_host_and_only_together() {
    let id = ("e2b-sandbox-id", "iabc");
    let port = ("e2b-sandbox-port", "3000");
    for host in ["localhost", "proxy.internal", "10.0.0.1:80"] {
        assert_eq!(
            routed("/", &[("host", host), id, port]),
            sandbox("iabc", 3000),
            "{host}"
        );
    }
    assert_eq!(routed("/", &[id, port]), sandbox("iabc", 3000));
    assert_eq!(
        routed("/", &[("e2b-sandbox-id", "iabc-6532622b"), port]),
        sandbox("iabc", 3000)
    );
    // The host label goes first.
    assert_eq!(routed("/", &[("host", "1-iother.x"), id, port]), sandbox("iother", 1));
    assert_eq!(routed("/", &[id]), Err(BadRoute::MissingHeader("e2b-sandbox-port")));
    assert_eq!(routed("/", &[port]), Err(BadRoute::MissingHeader("e2b-sandbox-id")));
    for bad in ["", "IABC", "i_abc", "../x", "iabc-", "iabc-a-b"] {
        assert_eq!(
            routed("/", &[("e2b-sandbox-id", bad), port]),
            Err(BadRoute::Id),
            "{bad:?}"
        );
    }
    for bad in ["", "0", "65536", "-1", "+80", "http", "8 0", "0x50"] {
        assert_eq!(
            routed("/", &[id, ("e2b-sandbox-port", bad)]),
            Err(BadRoute::Port),
            "{bad:?}"
        );
    }
    assert_eq!(
        routed("/", &[id, id, port]),
        Err(BadRoute::RepeatedHeader("e2b-sandbox-id"))
    );
}

#[test]
fn the_name_of_the_api_is_the_api_whatever_a_request_carries() {
    let (id, port) = (("e2b-sandbox-id", "iabc"), ("e2b-sandbox-port", "3000"));
    for host in ["api.here.test", "api.here.test:3000"] {
        for headers in [
            &[id, port] as &[_],
            &[id],
            &[("e2b-sandbox-id", "../x"), port],
            &[id, id, port],
        ] {
            let mut all = vec![("host", host)];
            all.extend(headers);
            assert_eq!(routed("/sandboxes", &all), Ok(Route::Api), "{all:?}");
        }
        assert_eq!(routed("/files?signature=x", &[("host", host)]), Ok(Route::Api));
        assert_eq!(routed(&format!("http://{host}/"), &[id, port]), Ok(Route::Api));
    }
    for host in ["api.other.test", "x.api.here.test", "api.here.test.", "api.here.test:x"] {
        assert_eq!(
            routed("/", &[("host", host), id, port]),
            sandbox("iabc", 3000),
            "{host}"
        );
    }
    let twice = [("host", "api.here.test"), ("host", "3000-iabc.x")];
    assert_eq!(routed("/", &twice), Err(BadRoute::Host));
}

#[test]
fn what_the_api_takes_is_its_own_where_headers_name_the_agent() {
    let id = ("e2b-sandbox-id", "iabc");
    let agent = ("e2b-sandbox-port", "49983");
    let key = ("x-api-key", "a key of the platform");
    assert_eq!(routed("/", &[id, agent, key]), Ok(Route::Api));
    assert_eq!(
        routed("/", &[("host", "localhost:3000"), id, agent, key]),
        Ok(Route::Api)
    );
    // Without what the API asks for, on any other port, and where a name says which sandbox is meant.
    assert_eq!(routed("/", &[id, agent]), sandbox("iabc", 49983));
    assert_eq!(
        routed("/", &[id, ("e2b-sandbox-port", "3000"), key]),
        sandbox("iabc", 3000)
    );
    assert_eq!(
        routed("/", &[("host", "49983-iabc.x"), id, agent, key]),
        sandbox("iabc", 49983)
    );
    // What is spelled wrong stays wrong.
    assert_eq!(
        routed("/", &[("e2b-sandbox-id", "../x"), agent, key]),
        Err(BadRoute::Id)
    );
    assert_eq!(
        routed("/", &[id, key]),
        Err(BadRoute::MissingHeader("e2b-sandbox-port"))
    );
}

#[test]
fn a_signed_file_link_carries_its_claim() {
    let signed = |path: &str, operation, username: &str, expiration| {
        Ok(Route::SignedFile(SignedFile {
            path: path.to_owned(),
            operation,
            username: username.to_owned(),
            signature: "v1_a+b/c".to_owned(),
            expiration,
        }))
    };
    let signature = "signature=v1_a%2Bb%2Fc";
    assert_eq!(
        routed(
            &format!("/files?path=%2Fa%20b&username=root&{signature}&signature_expiration=9"),
            &[]
        ),
        signed("/a b", "read", "root", Some(9))
    );
    assert_eq!(
        routed(&format!("/files?{signature}"), &[]),
        signed("", "read", "", None)
    );
    assert_eq!(
        routed(&format!("/files?{signature}&path=a&path=b&signature=x"), &[]),
        signed("a", "read", "", None)
    );
    assert_eq!(routed("/files?path=a", &[]), Ok(Route::Api));
    assert_eq!(routed("/files", &[]), Ok(Route::Api));
    assert_eq!(routed(&format!("/files/x?{signature}"), &[]), Ok(Route::Api));
    assert_eq!(routed("/files?signature=%zz", &[]), Ok(Route::Api));

    for (method, announced, want) in [
        (Method::HEAD, None, "read"),
        (Method::POST, None, "write"),
        (Method::PUT, None, "write"),
        (Method::DELETE, None, ""),
        (Method::OPTIONS, Some("POST"), "write"),
        (Method::OPTIONS, Some("GET"), "read"),
        (Method::OPTIONS, None, ""),
        (Method::GET, Some("POST"), "read"),
    ] {
        let mut request = Request::builder().method(&method).uri(format!("/files?{signature}"));
        if let Some(announced) = announced {
            request = request.header("access-control-request-method", announced);
        }
        match route(&request.body(()).expect("a request").into_parts().0, &KeyedApi) {
            Ok(Route::SignedFile(signed)) => assert_eq!(signed.operation, want, "{method} {announced:?}"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn control_paths_are_found_however_they_are_spelled() {
    for path in [
        "/init",
        "//init",
        "/./init",
        "/files/../init",
        "/../../init",
        "/%69nit",
        "/files%2f..%2finit",
        "/init/",
        "/freeze",
        "/unfreeze",
        "/collapse",
        "/fsfreeze",
        "/fsthaw",
        "/upgrade",
        "/events",
    ] {
        assert!(is_control_path(path), "{path}");
    }
    for path in [
        "/",
        "/health",
        "/init2",
        "/init/x",
        "/Init",
        "/%2569nit",
        "/%zz",
        "/files/init",
        "*",
    ] {
        assert!(!is_control_path(path), "{path}");
    }
}
