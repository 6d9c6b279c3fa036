//! Page tokens of lists.
//!
//! A token contains the time and the id of the last item of a page, and the order unless it is the default. It is
//! opaque to clients.

use std::fmt::Display;
use std::str::FromStr;

use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE;
use http::{HeaderName, HeaderValue};
use store::sandboxes::Order;

use super::error::ApiError;
use crate::clock::{parse_rfc3339, rfc3339};

const NEXT_TOKEN: HeaderName = HeaderName::from_static("x-next-token");

/// Cuts what was found to a page. Returns `true` if there is more, for which one more than a page has was looked for.
pub(super) fn cut<T>(found: &mut Vec<T>, limit: u32) -> bool {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let has_more = found.len() > limit;
    found.truncate(limit);
    has_more
}

/// Adds the token of the next page to a response, if there is one.
pub(super) fn with_next<I: Display>(
    mut response: Response,
    next: Option<(i64, I)>,
    order: Order,
) -> Result<Response, ApiError> {
    if let Some((at_us, id)) = next {
        let value = HeaderValue::try_from(token(at_us, id, order));
        let value = value.map_err(ApiError::failed)?;
        response.headers_mut().insert(NEXT_TOKEN, value);
    }
    Ok(response)
}

fn token(at_us: i64, id: impl Display, order: Order) -> String {
    let suffix = match order {
        Order::Desc => "",
        Order::Asc => "__asc",
    };
    URL_SAFE.encode(format!("{}__{id}{suffix}", rfc3339(at_us)))
}

/// The time and the id in a token of a list with this order.
pub(super) fn parse_token<I: FromStr>(token: &str, order: Order) -> Result<(i64, I), ApiError> {
    read(token, order).ok_or_else(|| ApiError::invalid("invalid next token"))
}

fn read<I: FromStr>(token: &str, order: Order) -> Option<(i64, I)> {
    let text = String::from_utf8(URL_SAFE.decode(token).ok()?).ok()?;
    let mut parts = text.split("__");
    let (time, id, suffix) = (parts.next()?, parts.next()?, parts.next());
    let fits = match order {
        Order::Desc => suffix.is_none(),
        Order::Asc => suffix == Some("asc"),
    };
    if !fits || parts.next().is_some() {
        return None;
    }
    Some((parse_rfc3339(time)?, id.parse().ok()?))
}

/// A cursor of the parts that say where a page begins. No part has a `:`.
pub(super) fn cursor<const N: usize>(parts: [&dyn Display; N]) -> String {
    URL_SAFE.encode(parts.map(ToString::to_string).join(":"))
}

/// The parts of a cursor.
pub(super) fn parse_cursor<const N: usize>(cursor: &str) -> Result<[String; N], ApiError> {
    let parts = || {
        let text = String::from_utf8(URL_SAFE.decode(cursor).ok()?).ok()?;
        let parts: Vec<String> = text.split(':').map(str::to_owned).collect();
        parts.try_into().ok()
    };
    parts().ok_or_else(invalid_cursor)
}

/// 400: the cursor is none of a previous page.
pub(super) fn invalid_cursor() -> ApiError {
    ApiError::invalid("invalid cursor")
}

#[cfg(test)]
mod tests {
    use model::id::SandboxId;

    use super::*;

    #[test]
    fn page_tokens_are_valid_in_their_order_only() {
        let id: SandboxId = "iabc".parse().expect("an id");
        let at_us = 1_785_000_000_123_456;
        for (made, wanted, fits) in [
            (Order::Desc, Order::Desc, true),
            (Order::Asc, Order::Asc, true),
            (Order::Desc, Order::Asc, false),
            (Order::Asc, Order::Desc, false),
        ] {
            let back = read(&token(at_us, &id, made), wanted);
            assert_eq!(back, fits.then(|| (at_us, id.clone())), "{made:?} {wanted:?}");
        }
        for bad in ["", "?", "YQ==", "YV9fYg==", "////"] {
            assert!(read::<SandboxId>(bad, Order::Desc).is_none(), "{bad}");
        }
    }

    #[test]
    fn cursors_have_the_parts_that_they_were_made_of() {
        let made = cursor([&"name_asc", &-5_i64, &"v1._-"]);
        assert_eq!(
            parse_cursor::<3>(&made).expect("a cursor"),
            ["name_asc", "-5", "v1._-"].map(str::to_owned)
        );
        for bad in [made.as_str(), "", "?", "YQ==", "////"] {
            assert!(parse_cursor::<2>(bad).is_err(), "{bad}");
        }
    }
}
