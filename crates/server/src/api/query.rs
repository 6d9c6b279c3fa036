//! Parsing of query strings as SDKs encode them. The parameters are declared next to each handler with [`shape`].

pub(crate) mod shape;

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use formats::percent::{self, Plus};
use http::Uri;

use super::error::ApiError;

/// The parameters of a request, decoded once, in order.
#[derive(Debug)]
pub(crate) struct Query(Vec<(String, String)>);

impl Query {
    /// Decodes the query of a request target.
    pub(crate) fn of(uri: &Uri) -> Result<Self, ApiError> {
        percent::query_pairs(uri.query().unwrap_or_default())
            .collect::<Result<_, _>>()
            .map(Self)
            .map_err(|_| ApiError::schema("the query has an invalid percent escape"))
    }

    /// The value of a parameter. It may occur only once, because of two values neither is preferred.
    pub(crate) fn single<'a>(&'a self, name: &'a str) -> Result<Option<&'a str>, ApiError> {
        let mut values = self.all(name);
        let value = values.next();
        match values.next() {
            None => Ok(value),
            Some(_) => Err(ApiError::schema(format_args!(
                "parameter \"{name}\": must not be given more than once"
            ))),
        }
    }

    /// Every value of a parameter.
    pub(crate) fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.0
            .iter()
            .filter(move |(key, _)| key == name)
            .map(|(_, value)| value.as_str())
    }

    /// The integer value of a parameter, if it is present.
    pub(crate) fn integer(&self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let Some(text) = self.single(name)? else {
            return Ok(None);
        };
        let number: i64 = text
            .parse()
            .map_err(|_| ApiError::schema(format_args!("parameter \"{name}\": an invalid integer: {text:?}")))?;
        if range.contains(&number) {
            return Ok(Some(number));
        }
        let most = match *range.end() {
            i64::MAX => String::new(),
            most => format!(" and at most {most}"),
        };
        Err(ApiError::schema(format_args!(
            "parameter \"{name}\": number must be at least {}{most}",
            range.start()
        )))
    }
}

/// Parses a metadata filter from its parameter, which has been decoded once.
///
/// SDKs encode each key and value, then the joined pairs, then the query; documents describe the same without the
/// second step. So the text is decoded as a whole first; if that gives no valid pairs, the parts of the original text
/// are decoded.
pub(crate) fn parse_metadata(text: &str) -> Result<BTreeMap<String, String>, ApiError> {
    percent::decode(text, Plus::Space)
        .ok()
        .and_then(|pairs| parse_pairs(&pairs))
        .or_else(|| parse_pairs(text))
        .ok_or_else(|| ApiError::invalid("invalid metadata filter: it must consist of key=value pairs joined by &"))
}

fn parse_pairs(text: &str) -> Option<BTreeMap<String, String>> {
    text.split('&')
        .map(|pair| {
            let (key, value) = pair.split_once('=').filter(|(_, value)| !value.contains('='))?;
            Some((
                percent::decode(key, Plus::Space).ok()?,
                percent::decode(value, Plus::Space).ok()?,
            ))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_filters_are_read_in_both_encodings() {
        let check = |text: &str, want: Option<&[(&str, &str)]>| {
            let want = want.map(|pairs| pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect());
            assert_eq!(parse_metadata(text).ok(), want, "{text}");
        };
        // {"us er": "a&b"} with the three encodings of SDKs, after one decoding.
        check("us%2520er%3Da%2526b", Some(&[("us er", "a&b")]));
        // With two encodings, after one decoding.
        check("us%20er=a%26b", Some(&[("us er", "a&b")]));
        check("a=1%3D", Some(&[("a", "1=")]));
        check("user=alice", Some(&[("user", "alice")]));
        check("user=alice&app=x+y", Some(&[("user", "alice"), ("app", "x y")]));
        check("a=", Some(&[("a", "")]));
        for bad in ["", "a", "a=b=c", "a=b&", "a=%zz", "&"] {
            check(bad, None);
        }
    }
}
