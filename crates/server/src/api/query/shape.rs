//! Declarations of query parameters: one line defines how a parameter is parsed and how it is described.

use std::collections::BTreeMap;

use axum::extract::FromRequestParts;
use http::request;
use model::limits::LIST_LIMIT;
use utoipa::openapi::path::{ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::{KnownFormat, SchemaFormat};
use utoipa::openapi::{Object, ObjectBuilder, RefOr, Required, Schema, Type};

use super::{Query, parse_metadata};
use crate::api::error::ApiError;
use crate::clock::parse_rfc3339;

/// A type of parameter.
pub(crate) trait Parameter {
    /// The type of its parsed value.
    type Value;

    /// Parses the parameter, if it is present.
    fn take(query: &Query, name: &str) -> Result<Option<Self::Value>, ApiError>;

    /// The schema of its values.
    fn schema() -> RefOr<Schema>;

    /// Adds details that the schema does not have.
    fn describe(parameter: ParameterBuilder) -> ParameterBuilder {
        parameter
    }
}

/// A declared set of parameters.
pub(crate) trait Parameters: Sized {
    /// Parses the parameters.
    fn read(query: &Query) -> Result<Self, ApiError>;
}

/// The parameters of a request.
#[derive(Debug)]
pub(crate) struct Params<T>(pub(crate) T);

impl<S: Send + Sync, T: Parameters> FromRequestParts<S> for Params<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, _: &S) -> Result<Self, ApiError> {
        T::read(&Query::of(&parts.uri)?).map(Self)
    }
}

/// Any text.
pub(crate) struct Text;

impl Parameter for Text {
    type Value = String;

    fn take(query: &Query, name: &str) -> Result<Option<String>, ApiError> {
        Ok(query.single(name)?.map(str::to_owned))
    }

    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new().schema_type(Type::String).into()
    }
}

/// Text of at most `MAX` characters.
pub(crate) struct ShortText<const MAX: usize>;

impl<const MAX: usize> Parameter for ShortText<MAX> {
    type Value = String;

    fn take(query: &Query, name: &str) -> Result<Option<String>, ApiError> {
        match query.single(name)? {
            Some(text) if text.chars().count() > MAX => Err(ApiError::schema(format_args!(
                "parameter \"{name}\": maximum string length is {MAX}"
            ))),
            text => Ok(text.map(str::to_owned)),
        }
    }

    fn schema() -> RefOr<Schema> {
        let text = ObjectBuilder::new().schema_type(Type::String);
        text.max_length(Some(MAX)).into()
    }
}

/// A number from `MIN` to `MAX`.
pub(crate) struct Number<const MIN: i64, const MAX: i64>;

impl<const MIN: i64, const MAX: i64> Parameter for Number<MIN, MAX> {
    type Value = i64;

    fn take(query: &Query, name: &str) -> Result<Option<i64>, ApiError> {
        query.integer(name, MIN..=MAX)
    }

    fn schema() -> RefOr<Schema> {
        integer(KnownFormat::Int64)
            .minimum(Some(MIN))
            .maximum((MAX < i64::MAX).then_some(MAX))
            .into()
    }
}

fn integer(format: KnownFormat) -> ObjectBuilder {
    ObjectBuilder::new()
        .schema_type(Type::Integer)
        .format(Some(SchemaFormat::KnownFormat(format)))
}

/// Maximum number of items on one page.
pub(crate) struct PageLimit;

impl Parameter for PageLimit {
    type Value = u32;

    fn take(query: &Query, name: &str) -> Result<Option<u32>, ApiError> {
        let limit = query.integer(name, i64::from(*LIST_LIMIT.start())..=i64::from(*LIST_LIMIT.end()))?;
        Ok(limit.map(|limit| u32::try_from(limit).expect("within the range of a page")))
    }

    fn schema() -> RefOr<Schema> {
        integer(KnownFormat::Int32)
            .minimum(Some(*LIST_LIMIT.start()))
            .maximum(Some(*LIST_LIMIT.end()))
            .into()
    }
}

/// `true` or `false`.
pub(crate) struct Flag;

impl Parameter for Flag {
    type Value = bool;

    fn take(query: &Query, name: &str) -> Result<Option<bool>, ApiError> {
        match query.single(name)? {
            None => Ok(None),
            Some("true") => Ok(Some(true)),
            Some("false") => Ok(Some(false)),
            Some(_) => Err(ApiError::schema(format_args!(
                "parameter \"{name}\": value must be true or false"
            ))),
        }
    }

    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new().schema_type(Type::Boolean).into()
    }
}

/// A time, in microseconds since the Unix epoch.
pub(crate) struct Time;

impl Parameter for Time {
    type Value = i64;

    fn take(query: &Query, name: &str) -> Result<Option<i64>, ApiError> {
        let invalid = || ApiError::schema(format_args!("parameter \"{name}\": not a time"));
        let text = query.single(name)?;
        text.map(|text| parse_rfc3339(text).ok_or_else(invalid)).transpose()
    }

    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .schema_type(Type::String)
            .format(Some(SchemaFormat::KnownFormat(KnownFormat::DateTime)))
            .into()
    }
}

/// Pairs that the metadata of a sandbox must contain.
pub(crate) struct MetadataFilter;

impl Parameter for MetadataFilter {
    type Value = BTreeMap<String, String>;

    fn take(query: &Query, name: &str) -> Result<Option<Self::Value>, ApiError> {
        query.single(name)?.map(parse_metadata).transpose()
    }

    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new().schema_type(Type::String).into()
    }

    fn describe(parameter: ParameterBuilder) -> ParameterBuilder {
        parameter.example(Some("user=alice&app=x".into()))
    }
}

/// An enumeration as a parameter.
pub(crate) trait EnumParameter: Sized + Copy + 'static {
    /// The names of the values, in the order of the schema.
    const VALUES: &'static [(&'static str, Self)];
    /// The description of the schema.
    const DESCRIPTION: &'static str;
    /// The name of the default value.
    const DEFAULT: Option<&'static str> = None;
}

/// A parameter with a value of an enumeration.
pub(crate) struct OneOf<T>(std::marker::PhantomData<T>);

impl<T: EnumParameter> Parameter for OneOf<T> {
    type Value = T;

    fn take(query: &Query, name: &str) -> Result<Option<T>, ApiError> {
        query.single(name)?.map(|word| parse_value(word, name)).transpose()
    }

    fn schema() -> RefOr<Schema> {
        let mut words: Object = enum_schema::<T>().description(Some(T::DESCRIPTION)).build();
        words.default = T::DEFAULT.map(Into::into);
        words.into()
    }
}

/// Parses the name of a value.
pub(crate) fn parse_value<T: EnumParameter>(word: &str, name: &str) -> Result<T, ApiError> {
    let found = T::VALUES.iter().find(|(known, _)| *known == word);
    found.map(|(_, meaning)| *meaning).ok_or_else(|| {
        let allowed: Vec<String> = T::VALUES.iter().map(|(word, _)| format!("{word:?}")).collect();
        ApiError::schema(format_args!(
            "parameter \"{name}\": value is not one of the allowed values [{}]",
            allowed.join(",")
        ))
    })
}

fn enum_schema<T: EnumParameter>() -> ObjectBuilder {
    ObjectBuilder::new()
        .schema_type(Type::String)
        .enum_values(Some(T::VALUES.iter().map(|(word, _)| *word)))
}

/// The description of a declared parameter.
pub(crate) fn parameter<P: Parameter>(
    name: &str,
    lines: &[&str],
    default: Option<serde_json::Value>,
    is_required: bool,
) -> utoipa::openapi::path::Parameter {
    let mut schema = P::schema();
    if let RefOr::T(Schema::Object(object)) = &mut schema
        && default.is_some()
    {
        object.default = default;
    }
    let required = if is_required { Required::True } else { Required::False };
    let parameter = ParameterBuilder::new()
        .name(name)
        .parameter_in(ParameterIn::Query)
        .description(crate::api::body::shape::description(lines))
        .required(required)
        .schema(Some(schema));
    P::describe(parameter).build()
}

/// Declares parameters: `"name" field: Kind;`, optionally with `= default`, and with `=> required` or `=> hidden`
/// (which is parsed but not described).
macro_rules! query {
    (
        $(#[doc = $about:literal])*
        $vis:vis struct $struct:ident {
            $(
                $(#[doc = $doc:literal])*
                $name:literal $field:ident: $kind:ty $(= $default:expr)? $(=> $flag:ident)?;
            )*
        }
    ) => {
        $(#[doc = $about])*
        $vis struct $struct {
            $($(#[doc = $doc])* $field: $crate::api::query::shape::part!(@type $kind $(= $default)? $(=> $flag)?),)*
        }

        impl $crate::api::query::shape::Parameters for $struct {
            fn read(query: &$crate::api::query::Query) -> Result<Self, $crate::api::error::ApiError> {
                Ok(Self {
                    $($field: $crate::api::query::shape::part!(
                        @take <$kind as $crate::api::query::shape::Parameter>::take(query, $name)?,
                        $name $(= $default)? $(=> $flag)?
                    ),)*
                })
            }
        }

        impl utoipa::IntoParams for $struct {
            fn into_params(
                _: impl Fn() -> Option<utoipa::openapi::path::ParameterIn>,
            ) -> Vec<utoipa::openapi::path::Parameter> {
                let all = [$($crate::api::query::shape::part!(
                    @describe $kind, $name, [$($doc),*] $(= $default)? $(=> $flag)?
                )),*];
                all.into_iter().flatten().collect()
            }
        }
    };
}
pub(crate) use query;

/// The parts of [`query!`] that depend on the options of a line.
macro_rules! part {
    (@type $kind:ty) => { Option<<$kind as $crate::api::query::shape::Parameter>::Value> };
    (@type $kind:ty => hidden) => { Option<<$kind as $crate::api::query::shape::Parameter>::Value> };
    (@type $kind:ty => required) => { <$kind as $crate::api::query::shape::Parameter>::Value };
    (@type $kind:ty = $default:expr) => { <$kind as $crate::api::query::shape::Parameter>::Value };
    (@take $taken:expr, $name:literal) => { $taken };
    (@take $taken:expr, $name:literal => hidden) => { $taken };
    (@take $taken:expr, $name:literal => required) => {
        $taken.ok_or_else(|| {
            $crate::api::error::ApiError::schema(concat!("parameter \"", $name, "\": value is required but missing"))
        })?
    };
    (@take $taken:expr, $name:literal = $default:expr) => { $taken.unwrap_or($default) };
    (@describe $kind:ty, $name:literal, $docs:tt => hidden) => { None };
    (@describe $kind:ty, $name:literal, [$($doc:literal),*]) => {
        Some($crate::api::query::shape::parameter::<$kind>($name, &[$($doc),*], None, false))
    };
    (@describe $kind:ty, $name:literal, [$($doc:literal),*] => required) => {
        Some($crate::api::query::shape::parameter::<$kind>($name, &[$($doc),*], None, true))
    };
    (@describe $kind:ty, $name:literal, [$($doc:literal),*] = $default:expr) => {
        Some($crate::api::query::shape::parameter::<$kind>($name, &[$($doc),*], Some($default.into()), false))
    };
}
pub(crate) use part;
