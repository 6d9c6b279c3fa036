//! Content coding of an answer, by `Accept-Encoding` or a header like it.
//!
//! The client's order of preference decides, and gzip is the only coding besides identity.

use http::header::{HeaderMap, HeaderName};

/// The coding of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Coding {
    Identity,
    /// `only`: the client refuses identity.
    Gzip {
        only: bool,
    },
}

/// Coding that this header prefers; `None` when the client refuses all there are.
pub(crate) fn preferred(headers: &HeaderMap, name: &HeaderName) -> Option<Coding> {
    of_values(&texts(headers, name))
}

/// Whether this header prefers gzip.
pub(crate) fn prefers_gzip(headers: &HeaderMap, name: &HeaderName) -> bool {
    matches!(preferred(headers, name), Some(Coding::Gzip { .. }))
}

fn texts<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Vec<&'a str> {
    let values = headers.get_all(name).iter();
    values.filter_map(|value| value.to_str().ok()).collect()
}

fn of_values(values: &[&str]) -> Option<Coding> {
    let items = values.iter().flat_map(|value| value.split(','));
    let mut codings: Vec<(String, f32)> = items.filter_map(parse).collect();
    // Stable: of those that are liked as much, the first counts.
    codings.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    let quality = |name: &str| {
        codings
            .iter()
            .find(|(found, _)| found == name)
            .map(|(_, quality)| *quality)
    };
    let refuses = |name: &str| quality(name).or(quality("*")) == Some(0.0);
    let gzip = Coding::Gzip {
        only: refuses("identity"),
    };
    let wanted = codings.iter().filter(|(_, quality)| *quality > 0.0);
    let chosen = wanted.filter_map(|(name, _)| match name.as_str() {
        "gzip" => Some(gzip),
        "identity" => Some(Coding::Identity),
        "*" if !refuses("identity") => Some(Coding::Identity),
        "*" if !refuses("gzip") => Some(gzip),
        _ => None,
    });
    let fallback = || (!refuses("identity")).then_some(Coding::Identity);
    chosen.into_iter().next().or_else(fallback)
}

/// The name and the quality of one item. What is not a number counts as none given.
fn parse(item: &str) -> Option<(String, f32)> {
    let mut parts = item.split(';');
    let name = parts.next()?.trim().to_ascii_lowercase();
    if name.is_empty() {
        return None;
    }
    let quality = parts.find_map(|part| {
        let (key, value) = part.split_once('=')?;
        key.trim()
            .eq_ignore_ascii_case("q")
            .then(|| value.trim().parse::<f32>())
    });
    let quality = match quality {
        Some(Ok(quality)) if quality.is_finite() => quality.clamp(0.0, 1.0),
        _ => 1.0,
    };
    Some((name, quality))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn preferences() {
        let gzip = Some(Coding::Gzip { only: false });
        let only_gzip = Some(Coding::Gzip { only: true });
        let identity = Some(Coding::Identity);
        for (value, expect) in [
            ("", identity),
            (" , ", identity),
            ("gzip", gzip),
            ("GZip", gzip),
            ("gzip, deflate, br", gzip),
            ("br;q=1.0, gzip;q=0.8, *;q=0.1", gzip),
            ("deflate", identity),
            ("identity", identity),
            ("identity, gzip", identity),
            ("gzip, identity", gzip),
            ("gzip;q=0.5, identity", identity),
            ("gzip;q=0.5, identity;q=0.4", gzip),
            ("gzip;q=0", identity),
            ("gzip; q=0.000", identity),
            ("*", identity),
            ("*;q=0.5, gzip", gzip),
            ("identity;q=0", None),
            ("identity;q=0, deflate", None),
            ("identity;q=0, gzip", only_gzip),
            ("identity;q=0, *", only_gzip),
            ("*;q=0", None),
            ("*;q=0, gzip", only_gzip),
            ("*;q=0, identity", identity),
            ("*;q=0, identity, gzip;q=0.5", identity),
            ("gzip;q=0, identity;q=0, *", None),
            ("gzip;q=x", gzip),
            ("gzip;q=NaN", gzip),
            ("gzip;q=-1", identity),
            ("gzip;level=9;q=0", identity),
        ] {
            assert_eq!(of_values(&[value]), expect, "{value}");
        }
        assert_eq!(of_values(&[]), identity);
        assert_eq!(of_values(&["deflate", "gzip"]), gzip);
    }
}
