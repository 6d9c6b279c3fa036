//! The JSON mapping of protocol buffers, as far as the messages here need it: the parts where serde's own reading
//! and writing differ.
//!
//! Input is lenient where the mapping is: null means the default, 32-bit numbers may be quoted or written as an
//! integral fraction, bytes may use either base64 alphabet with or without padding, enums may be names or numbers.

use std::fmt;
use std::marker::PhantomData;

use base64::Engine;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

/// Either padding on input, always padded on output.
const LENIENT: GeneralPurposeConfig =
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
const STANDARD: GeneralPurpose = GeneralPurpose::new(&alphabet::STANDARD, LENIENT);
const URL_SAFE: GeneralPurpose = GeneralPurpose::new(&alphabet::URL_SAFE, LENIENT);

/// Reads a value whose null means the default.
///
/// # Errors
/// Those of the value.
pub fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(from: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// Whether a value is its type's zero and so left out on output.
pub fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A number that may be quoted.
struct Lenient<T>(T);

struct NumberVisitor<T>(PhantomData<T>);

impl<T: TryFrom<i128>> Visitor<'_> for NumberVisitor<T> {
    type Value = Lenient<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an integer in range")
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Self::Value, E> {
        in_range(i128::from(value))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Self::Value, E> {
        in_range(i128::from(value))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Self::Value, E> {
        // 2^53: above it a floating-point number cannot represent every integer.
        if value.fract() != 0.0 || value.abs() > 9_007_199_254_740_992.0 {
            return Err(E::custom("not an integer"));
        }
        #[expect(clippy::cast_possible_truncation, reason = "integral and small, checked above")]
        let value = value as i64;
        self.visit_i64(value)
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Self::Value, E> {
        in_range(value.parse().map_err(|_| E::custom("not an integer"))?)
    }
}

fn in_range<T: TryFrom<i128>, E: de::Error>(value: i128) -> Result<Lenient<T>, E> {
    T::try_from(value)
        .map(Lenient)
        .map_err(|_| E::custom("number out of range"))
}

impl<'de, T: TryFrom<i128>> Deserialize<'de> for Lenient<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(NumberVisitor(PhantomData))
    }
}

/// Reads a number; null is zero.
///
/// # Errors
/// When it is no integer of the type's range.
pub fn number<'de, D: Deserializer<'de>, T: TryFrom<i128> + Default>(from: D) -> Result<T, D::Error> {
    Ok(optional_number(from)?.unwrap_or_default())
}

/// Reads a number; null is none.
///
/// # Errors
/// When it is no integer of the type's range.
pub fn optional_number<'de, D: Deserializer<'de>, T: TryFrom<i128>>(from: D) -> Result<Option<T>, D::Error> {
    let number: Option<Lenient<T>> = Option::deserialize(from)?;
    Ok(number.map(|number| number.0))
}

/// Bytes as base64 text.
pub mod optional_bytes {
    use super::{Deserialize, Deserializer, Engine, STANDARD, Serialize, Serializer, URL_SAFE, de};
    use bytes::Bytes;

    /// Writes base64, null for none.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(bytes: &Option<Bytes>, to: S) -> Result<S::Ok, S::Error> {
        bytes.as_ref().map(|bytes| STANDARD.encode(bytes)).serialize(to)
    }

    /// Reads base64 of either alphabet.
    ///
    /// # Errors
    /// When it is neither.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Bytes>, D::Error> {
        let Some(text): Option<String> = Option::deserialize(from)? else {
            return Ok(None);
        };
        let url_safe = text.bytes().any(|byte| byte == b'-' || byte == b'_');
        let engine = if url_safe { URL_SAFE } else { STANDARD };
        let bytes = engine.decode(text).map_err(|_| de::Error::custom("invalid base64"))?;
        Ok(Some(Bytes::from(bytes)))
    }
}

/// Reads an enum value: a name out of `names`, or any number.
///
/// # Errors
/// When it is an unknown name, or neither.
pub fn enumeration<'de, D: Deserializer<'de>>(from: D, names: &'static [(&'static str, i32)]) -> Result<i32, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum NameOrNumber {
        Number(i32),
        Name(String),
    }
    match Option::deserialize(from)? {
        None => Ok(0),
        Some(NameOrNumber::Number(number)) => Ok(number),
        Some(NameOrNumber::Name(name)) => names
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, number)| *number)
            .ok_or_else(|| de::Error::custom("invalid value for enum")),
    }
}

/// Writes an enum value as its name, or as its number when it has none here.
///
/// # Errors
/// Those of the serializer.
pub fn enumeration_name<S: Serializer>(
    number: i32,
    to: S,
    names: &'static [(&'static str, i32)],
) -> Result<S::Ok, S::Error> {
    match names.iter().find(|(_, known)| *known == number) {
        Some((name, _)) => to.serialize_str(name),
        None => to.serialize_i32(number),
    }
}
