//! Routing under random requests. `PROPTEST_CASES` says how many.

use http::{HeaderValue, Request};
use proptest::prelude::*;
use protocol::agent::CONTROL_PATHS;

use super::*;

fn parts(method: &str, uri: &str, headers: &[(&'static str, String)]) -> Option<request::Parts> {
    let mut builder = Request::builder().method(method).uri(uri);
    for (name, value) in headers {
        builder = builder.header(*name, HeaderValue::from_str(value).ok()?);
    }
    Some(builder.body(()).ok()?.into_parts().0)
}

/// What the first label of a host says, read letter by letter: a port and an id, or that it means no sandbox.
fn reference(host: &str) -> Option<Result<(u16, String), BadRoute>> {
    let label: String = host.chars().take_while(|letter| *letter != '.').collect();
    if label.len() == host.len() {
        return None;
    }
    let digits: String = label.chars().take_while(char::is_ascii_digit).collect();
    let rest = label[digits.len()..].strip_prefix('-')?;
    if digits.is_empty() {
        return None;
    }
    let number = digits.chars().try_fold(0_u32, |number, digit| {
        Some(number * 10 + digit.to_digit(10)?).filter(|number| *number <= 65_535)
    });
    let Some(port) = number
        .and_then(|number| u16::try_from(number).ok())
        .filter(|port| *port > 0)
    else {
        return Some(Err(BadRoute::Port));
    };
    let id: String = rest.chars().take_while(|letter| *letter != '-').collect();
    Some(match id.to_ascii_lowercase().parse::<SandboxId>() {
        Ok(id) => Ok((port, id.as_str().to_owned())),
        Err(_) => Err(BadRoute::Id),
    })
}

/// An API at `api.x` that takes whatever carries a key.
struct KeyedApi;

impl Api for KeyedApi {
    fn is_at(&self, host: &str) -> bool {
        host == "api.x"
    }

    fn takes(&self, request: &request::Parts) -> bool {
        request.headers.contains_key("x-api-key")
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn hosts_name_what_their_first_label_says(host in prop_oneof![
        "[0-9]{0,6}-?[a-zA-Z0-9]{0,6}(-[a-z0-9]{0,4}){0,2}\\.?[a-z.]{0,8}(:[0-9]{1,4})?",
        "[0-9a-zA-Z.:-]{0,24}",
        "[ -~]{0,20}",
        "[+0-9]{0,3}-[a-zé]{0,4}\\.x",
    ]) {
        let found = target_in_host(&host);
        match reference(&host) {
            None => prop_assert_eq!(found, Ok(None)),
            Some(Err(bad)) => prop_assert_eq!(found, Err(bad)),
            Some(Ok((port, id))) => {
                let target = found.unwrap().unwrap();
                prop_assert_eq!((target.port, target.id.as_str()), (port, id.as_str()));
            }
        }
    }

    /// A request that means a sandbox never becomes one for the API, unless the API takes it from the agent's port; and
    /// one for the API never reaches a sandbox.
    #[test]
    fn requests_go_where_they_say(
        host in prop::option::of(prop_oneof!["(49983|80|0|99999|x)-[a-z0-9]{1,4}\\.localhost", "localhost(:3000)?", "api\\.x", ".{0,6}"]),
        id in prop::collection::vec(prop_oneof!["[a-z0-9]{1,5}(-[a-z0-9]{1,3})?", "[A-Z -]{1,3}"], 0..3),
        port in prop::collection::vec(prop_oneof!["[0-9]{1,6}", "[+a-z -]{1,3}", Just("49983".to_owned())], 0..3),
        uri in prop_oneof![
            "/files(\\?(path|signature|username|signature_expiration)=[a-z0-9%+]{0,6}(&(signature|path)=[a-z0-9%]{0,4}){0,2})?",
            "/[a-z%.?/]{0,10}",
        ],
        method in prop::sample::select(vec!["GET", "POST", "OPTIONS", "DELETE", "HEAD"]),
        key in any::<bool>(),
    ) {
        let mut headers: Vec<(&'static str, String)> = Vec::new();
        headers.extend(host.iter().map(|host| ("host", host.clone())));
        headers.extend(id.iter().map(|id| (ID_HEADER, id.clone())));
        headers.extend(port.iter().map(|port| (PORT_HEADER, port.clone())));
        headers.extend(key.then(|| ("x-api-key", "k".to_owned())));
        let Some(parts) = parts(method, &uri, &headers) else { return Ok(()) };
        let by_host = host.as_deref().and_then(reference);
        let found = route(&parts, &KeyedApi);
        match by_host {
            _ if host.as_deref() == Some("api.x") => prop_assert_eq!(found, Ok(Route::Api)),
            Some(Ok((port, id))) => match found {
                Ok(Route::Sandbox(target)) => prop_assert_eq!((target.port, target.id.as_str()), (port, id.as_str())),
                // Not every text is a header of text.
                other => prop_assert!(!host.unwrap_or_default().is_ascii(), "{:?}", other),
            },
            Some(Err(_)) => prop_assert!(found.is_err()),
            None if !id.is_empty() || !port.is_empty() => match found {
                Ok(Route::Sandbox(target)) => {
                    prop_assert_eq!((id.len(), port.len()), (1, 1));
                    prop_assert_eq!(target.port.to_string(), port[0].trim().trim_start_matches('0'));
                    prop_assert_eq!(target.id.as_str(), id[0].trim().split('-').next().unwrap());
                    prop_assert!(!key || target.port != agent::PORT);
                }
                Ok(Route::Api) => {
                    prop_assert!(key);
                    prop_assert_eq!((id.len(), port[0].trim().trim_start_matches('0')), (1, "49983"));
                }
                Ok(other) => prop_assert!(false, "{:?}", other),
                Err(_) => {}
            },
            None => match found {
                Ok(Route::SignedFile(_)) => {
                    prop_assert!(parts.uri.path() == "/files");
                    prop_assert!(parts.uri.query().is_some_and(|query| query.contains("signature=")));
                }
                Ok(Route::Sandbox(target)) => prop_assert!(false, "{:?}", target),
                Ok(Route::Api) | Err(BadRoute::Host) => {}
                Err(other) => prop_assert!(false, "{:?}", other),
            },
        }
    }

    /// However a control route is written, it is one; and nothing else is.
    #[test]
    fn control_routes_are_known_in_any_spelling(
        name in prop::sample::select(CONTROL_PATHS.to_vec()),
        spelling in prop::collection::vec((0..5_u8, any::<bool>()), 12),
        before in prop::sample::select(vec!["/", "//", "/./", "/x/../", "/%2e/", "/x/%2E%2e/", "/../"]),
        after in prop::sample::select(vec!["", "/", "/.", "//", "/x/..", "%2f"]),
        more in "[a-z]{1,3}",
    ) {
        let written: String = name[1..]
            .bytes()
            .zip(spelling.iter().cycle())
            .map(|(byte, (escape, upper))| match (escape, upper) {
                (0, false) => format!("%{byte:02x}"),
                (0, true) => format!("%{byte:02X}"),
                _ => char::from(byte).to_string(),
            })
            .collect();
        let spelled = format!("{before}{written}{after}");
        prop_assert!(is_control_path(&spelled), "{}", spelled);
        let longer = format!("{before}{written}{more}{after}");
        let known = CONTROL_PATHS.iter().any(|path| path[1..] == format!("{}{more}", &name[1..]));
        prop_assert_eq!(is_control_path(&longer), known, "{}", longer);
        let below = format!("{before}{written}/{more}");
        prop_assert!(!is_control_path(&below), "{}", below);
    }

    #[test]
    fn escapes_are_decoded_as_they_were_made(text in ".{0,10}", broken in "[a-z%+]{0,8}") {
        let escaped: String = text.bytes().map(|byte| format!("%{byte:02X}")).collect();
        prop_assert_eq!(percent::decode(&escaped, percent::Plus::Plus), Ok(text.clone()));
        let pairs: Result<Vec<_>, _> = percent::query_pairs(&format!("k={escaped}&{escaped}=v")).collect();
        prop_assert_eq!(pairs, Ok(vec![("k".to_owned(), text.clone()), (text, "v".to_owned())]));
        if let Ok(decoded) = percent::decode(&broken, percent::Plus::Plus) {
            prop_assert_eq!(decoded.len() + 2 * broken.matches('%').count(), broken.len());
        }
    }
}
