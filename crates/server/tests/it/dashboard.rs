//! What a session of the dashboard leaves behind: the use of its key, and the count of its requests to agents.

use model::id::SandboxId;

use super::metrics::scrape;
use super::platform::{KEY, TestPlatform, pause, within};

/// A session of the dashboard on `localhost`, whose name says the port of the cookie.
struct Browser<'a> {
    platform: &'a TestPlatform,
    cookie: String,
}

impl<'a> Browser<'a> {
    async fn sign_in(platform: &'a TestPlatform, key: &str) -> Self {
        let headers = [
            ("host", "localhost"),
            ("content-type", "application/json"),
            ("x-ringfence-dashboard", "1"),
        ];
        let body = format!("{{\"credential\":\"{key}\"}}");
        let reply = platform.send("POST", "/dashboard/session", &headers, body).await;
        assert_eq!(reply.status, 200, "{reply:?}");
        let cookie = reply.header("set-cookie").split(';').next().unwrap_or_default();
        Self {
            platform,
            cookie: cookie.to_owned(),
        }
    }

    async fn get(&self, path: &str) -> u16 {
        let headers = [
            ("host", "localhost"),
            ("x-ringfence-dashboard", "1"),
            ("cookie", self.cookie.as_str()),
        ];
        let reply = self
            .platform
            .send("GET", &format!("/dashboard/{path}"), &headers, "")
            .await;
        reply.status.as_u16()
    }
}

#[tokio::test]
async fn a_session_records_the_use_of_its_key() {
    let platform = TestPlatform::start().await;
    let made = platform.call("POST", "/api-keys", r#"{"name":"browser"}"#).await;
    let key = made.json["key"].as_str().expect("a key").to_owned();
    let last_used = async || {
        let listed = platform.call("GET", "/api-keys", "").await;
        let keys = listed.json.as_array().expect("keys").clone();
        let own = keys.into_iter().find(|one| one["id"] == made.json["id"]);
        own.expect("the key")["lastUsed"].as_str().map(str::to_owned)
    };
    let changed = async |before: Option<String>| {
        within(async {
            loop {
                let now = last_used().await;
                if now != before {
                    return now;
                }
                pause().await;
            }
        })
        .await
    };
    let browser = Browser::sign_in(&platform, &key).await;
    let signed_in = changed(None).await;
    platform.clock.advance(3600);
    assert_eq!(last_used().await, signed_in, "nobody has used it since");
    assert_eq!(browser.get("api/v2/sandboxes").await, 200);
    assert!(changed(signed_in.clone()).await > signed_in);
    // A session that is only looked at is used as well.
    let used = last_used().await;
    platform.clock.advance(3600);
    assert_eq!(browser.get("session").await, 200);
    assert!(changed(used.clone()).await > used);
}

#[tokio::test]
async fn a_request_to_an_agent_counts_as_traffic() {
    let platform = TestPlatform::start().await;
    let id = platform.create("").await;
    let browser = Browser::sign_in(&platform, KEY).await;
    let status = browser.get(&format!("agent/{id}/health")).await;
    let series = |class: u16| format!("ringfence_proxy_requests_total{{status=\"{class}xx\"}}");
    let is_counted_once = async || {
        let scraped = scrape(&platform).await;
        for class in 1..=5 {
            scraped.is(&series(class), f64::from(u8::from(class == status / 100)));
        }
    };
    is_counted_once().await;
    // What reaches no agent is none.
    let unknown: SandboxId = "i99999999999999999999".parse().expect("an id");
    assert_eq!(browser.get(&format!("agent/{unknown}/health")).await, 404);
    assert_eq!(browser.get("api/v2/sandboxes").await, 200);
    is_counted_once().await;
}
