//! Which requests of a browser are the page's own.
//!
//! A browser sends the cookie along whoever makes it send a request. Three things tell the page's own requests from those of
//! other pages, and any one of them that is present and wrong refuses: the header [`MARK`], which a page of another origin
//! cannot set without being asked back (and nothing here answers a preflight); `Origin`; and what the browser itself says of
//! the request, `Sec-Fetch-Site` and `Sec-Fetch-Dest`. Sandboxes are on hosts below the platform's domain, which is the same
//! *site*, so anything but `same-origin` is refused.

use std::time::Duration;

use http::{HeaderMap, HeaderValue, Uri, header, request};

use crate::api::ApiError;
use crate::peers::ClientPeer;

/// The header that the page's own requests carry, with the value `1`.
const MARK: &str = "x-ringfence-dashboard";
/// Name of the cookie over HTTPS. The prefix makes browsers refuse one that a host below the same domain, such as a sandbox,
/// sets for this one.
const SECURE_COOKIE: &str = "__Host-ringfence-dashboard";
/// Beginning of the name over HTTP, where browsers accept no prefix. The port follows: cookies do not tell ports apart, and two
/// platforms on one machine must not sign each other out.
const PLAIN_COOKIE: &str = "ringfence-dashboard-";
/// Number of values of the cookie that are looked at.
const VALUES_MAX: usize = 4;

/// How a client reaches this server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Client {
    /// Whether the browser speaks HTTPS, with this server or with a reverse proxy before it.
    pub(super) is_https: bool,
    /// Whether the browser is on this machine, as far as can be seen.
    pub(super) is_local: bool,
}

impl Client {
    /// A reverse proxy is believed about the browser's protocol where it is on this machine or a configured one. Nobody gains
    /// by a lie: the answer to one who claims HTTPS is a cookie that is never sent without it.
    pub(super) fn of(peer: ClientPeer, headers: &HeaderMap) -> Self {
        let forwarded = headers.get("x-forwarded-proto").map(HeaderValue::as_bytes);
        let is_proxy = peer.is_loopback || peer.peer.is_none();
        Self {
            is_https: peer.is_tls || (is_proxy && forwarded.is_some_and(|proto| proto.eq_ignore_ascii_case(b"https"))),
            // A request that was forwarded comes from elsewhere.
            is_local: peer.is_loopback && forwarded.is_none() && !headers.contains_key("x-forwarded-for"),
        }
    }

    /// The cookie of sessions of such clients.
    pub(super) fn cookie(self, headers: &HeaderMap) -> Cookie {
        if self.is_https {
            return Cookie {
                name: SECURE_COOKIE.to_owned(),
                is_secure: true,
            };
        }
        let host = headers
            .get(header::HOST)
            .and_then(|host| host.to_str().ok())
            .unwrap_or_default();
        let port = host.rsplit_once(':').map_or("80", |(_, port)| port);
        let port: u16 = port.parse().unwrap_or(80);
        Cookie {
            name: format!("{PLAIN_COOKIE}{port}"),
            is_secure: false,
        }
    }
}

/// The cookie with the token of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cookie {
    name: String,
    is_secure: bool,
}

impl Cookie {
    /// A header that sets the cookie, or removes it when the lifetime is zero. `token` is hexadecimal.
    pub(super) fn set(&self, token: &str, lifetime: Duration) -> HeaderValue {
        // The prefix of the name demands the path `/`; without it the cookie need not leave the dashboard.
        let place = if self.is_secure {
            "Path=/; Secure"
        } else {
            "Path=/dashboard"
        };
        let (name, seconds) = (&self.name, lifetime.as_secs());
        let text = format!("{name}={token}; {place}; HttpOnly; SameSite=Strict; Max-Age={seconds}");
        let mut value = HeaderValue::try_from(text).expect("names and tokens are plain ASCII");
        value.set_sensitive(true);
        value
    }

    /// The values of the cookie in a request, of which a browser sends one.
    pub(super) fn values<'a>(&'a self, headers: &'a HeaderMap) -> impl Iterator<Item = &'a str> {
        let named = move |(name, value): (&'a str, &'a str)| (name == self.name).then_some(value);
        pairs(headers).filter_map(named).take(VALUES_MAX)
    }
}

/// The cookies of a request, as names and values.
fn pairs(headers: &HeaderMap) -> impl Iterator<Item = (&str, &str)> {
    let values = headers.get_all(header::COOKIE).iter();
    values
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(';'))
        .filter_map(|pair| pair.split_once('='))
        .map(|(name, value)| (name.trim(), value.trim()))
}

/// Whether a cookie, by its name, may be one of the dashboard.
pub(super) fn is_ours(name: &str) -> bool {
    name == SECURE_COOKIE || name.starts_with(PLAIN_COOKIE)
}

/// Refuses scripts of service workers: one below this path could answer for the dashboard as long as the browser keeps it.
pub(super) fn refuse_workers(headers: &HeaderMap) -> Result<(), ApiError> {
    if headers.contains_key("service-worker") {
        return Err(ApiError::forbidden("the dashboard has no service worker"));
    }
    Ok(())
}

/// Checks that a request was made by the page itself. A download is a navigation, which has no header of the page.
pub(super) fn check(parts: &request::Parts, client: Client, is_download: bool) -> Result<(), ApiError> {
    let headers = &parts.headers;
    let refused = || ApiError::forbidden("this request is not one of the dashboard's own page");
    let text = |name: &str| headers.get(name).map(HeaderValue::as_bytes);
    match text("sec-fetch-site") {
        None | Some(b"same-origin") => {}
        // The address of a download may be typed.
        Some(b"none") if is_download => {}
        Some(_) => return Err(refused()),
    }
    match text("sec-fetch-dest") {
        None | Some(b"empty") => {}
        Some(b"document") if is_download => {}
        Some(_) => return Err(refused()),
    }
    if headers.get_all(header::ORIGIN).iter().count() > 1 {
        return Err(refused());
    }
    if let Some(origin) = headers.get(header::ORIGIN)
        && !is_own(origin, parts, client)
    {
        return Err(refused());
    }
    if !is_download && text(MARK) != Some(b"1") {
        return Err(ApiError::forbidden(
            "this request is not one of the dashboard's own page: X-Ringfence-Dashboard is missing",
        ));
    }
    Ok(())
}

/// Whether an origin is this server as the browser addresses it.
fn is_own(origin: &HeaderValue, parts: &request::Parts, client: Client) -> bool {
    let host = match parts.uri.authority() {
        Some(authority) => authority.as_str(),
        None => match parts.headers.get(header::HOST).map(HeaderValue::to_str) {
            Some(Ok(host)) => host,
            Some(Err(_)) | None => return false,
        },
    };
    let Some(origin) = origin.to_str().ok().and_then(|origin| origin.parse::<Uri>().ok()) else {
        return false;
    };
    let (scheme, usual) = if client.is_https {
        ("https", ":443")
    } else {
        ("http", ":80")
    };
    let plain = |authority: &str| authority.strip_suffix(usual).unwrap_or(authority).to_ascii_lowercase();
    origin.scheme_str() == Some(scheme)
        && origin
            .authority()
            .is_some_and(|authority| plain(authority.as_str()) == plain(host))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::Peer;

    const LOCAL: Client = Client {
        is_https: false,
        is_local: true,
    };
    const SECURE: Client = Client {
        is_https: true,
        is_local: false,
    };

    fn parts(headers: &[(&str, &str)]) -> request::Parts {
        let mut request = http::Request::builder().uri("/dashboard/api/v2/sandboxes");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).expect("a request").into_parts().0
    }

    #[test]
    fn only_the_page_itself_is_let_through() {
        let own = [("host", "api.box.test"), ("x-ringfence-dashboard", "1")];
        let with = |more: &[(&'static str, &'static str)]| parts(&[&own[..], more].concat());
        for good in [
            &[][..],
            &[("sec-fetch-site", "same-origin"), ("sec-fetch-dest", "empty")],
            &[("origin", "https://api.box.test")],
            &[("origin", "https://API.box.test:443")],
        ] {
            assert!(check(&with(good), SECURE, false).is_ok(), "{good:?}");
        }
        for bad in [
            &[("sec-fetch-site", "same-site")][..],
            &[("sec-fetch-site", "cross-site")],
            &[("sec-fetch-site", "none")],
            &[("sec-fetch-dest", "script")],
            &[("sec-fetch-dest", "iframe")],
            &[("sec-fetch-dest", "document")],
            &[("origin", "null")],
            &[("origin", "http://api.box.test")],
            &[("origin", "https://api.box.test:8443")],
            &[("origin", "https://8000-iabc.box.test")],
            &[("origin", "https://api.box.test.evil.test")],
            &[("origin", "https://evil.test"), ("sec-fetch-site", "same-origin")],
            &[("origin", "https://api.box.test"), ("origin", "https://evil.test")],
        ] {
            assert!(check(&with(bad), SECURE, false).is_err(), "{bad:?}");
        }
        assert!(
            check(&parts(&[("host", "api.box.test")]), SECURE, false).is_err(),
            "the mark is missing"
        );
        assert!(
            check(
                &parts(&[("origin", "http://x:3000"), ("x-ringfence-dashboard", "1")]),
                LOCAL,
                false
            )
            .is_err()
        );
    }

    #[test]
    fn a_download_may_be_a_navigation_of_this_origin() {
        for (headers, is_good) in [
            (
                &[("sec-fetch-site", "same-origin"), ("sec-fetch-dest", "document")][..],
                true,
            ),
            (&[("sec-fetch-site", "none"), ("sec-fetch-dest", "document")], true),
            (&[], true),
            (
                &[("sec-fetch-site", "same-site"), ("sec-fetch-dest", "document")],
                false,
            ),
            (
                &[("sec-fetch-site", "same-origin"), ("sec-fetch-dest", "iframe")],
                false,
            ),
            (
                &[("sec-fetch-site", "same-origin"), ("sec-fetch-dest", "script")],
                false,
            ),
            (
                &[("sec-fetch-site", "same-origin"), ("sec-fetch-dest", "worker")],
                false,
            ),
        ] {
            assert_eq!(check(&parts(headers), LOCAL, true).is_ok(), is_good, "{headers:?}");
        }
    }

    #[test]
    fn clients_are_local_or_encrypted_or_neither() {
        let peer = |peer, is_loopback, is_tls| ClientPeer {
            peer,
            is_loopback,
            is_tls,
        };
        let (far, proxy) = (peer(Some(Peer::V6(1)), false, false), peer(None, false, false));
        let (near, tls) = (peer(None, true, false), peer(Some(Peer::V6(1)), false, true));
        let https = ("x-forwarded-proto", "https");
        for (peer, headers, expected) in [
            (far, &[][..], (false, false)),
            (far, &[https], (false, false)),
            (tls, &[], (true, false)),
            (near, &[], (false, true)),
            (near, &[https], (true, false)),
            (near, &[("x-forwarded-proto", "http")], (false, false)),
            (near, &[("x-forwarded-for", "192.0.2.1")], (false, false)),
            (proxy, &[], (false, false)),
            (proxy, &[https], (true, false)),
        ] {
            let client = Client::of(peer, &parts(headers).headers);
            assert_eq!((client.is_https, client.is_local), expected, "{peer:?} {headers:?}");
        }
    }

    #[test]
    fn cookies_are_set_for_this_host_alone_and_read_by_their_exact_name() {
        let headers = parts(&[
            ("host", "localhost:3000"),
            ("cookie", "a=1; ringfence-dashboard-3000=t; x=y"),
        ])
        .headers;
        let cookie = LOCAL.cookie(&headers);
        assert_eq!(cookie.values(&headers).collect::<Vec<_>>(), ["t"]);
        let set = cookie.set("ab", Duration::from_secs(5));
        assert_eq!(
            set.to_str().expect("text"),
            "ringfence-dashboard-3000=ab; Path=/dashboard; HttpOnly; SameSite=Strict; Max-Age=5"
        );
        let cookie = SECURE.cookie(&headers);
        assert_eq!(
            cookie.values(&headers).count(),
            0,
            "the other cookie is not one of HTTPS"
        );
        let set = cookie.set("", Duration::ZERO);
        assert_eq!(
            set.to_str().expect("text"),
            "__Host-ringfence-dashboard=; Path=/; Secure; HttpOnly; SameSite=Strict; Max-Age=0"
        );
        assert!(is_ours("ringfence-dashboard-3000") && is_ours(SECURE_COOKIE) && !is_ours("session"));
    }
}
