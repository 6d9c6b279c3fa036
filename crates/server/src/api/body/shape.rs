//! Declarations of bodies: one line defines how a key is parsed and how it is described in the API document.
//!
//! [`body!`](super::body) makes a struct of a declaration. The type of a field defines its values ([`BodyValue`]), and
//! a wrapper whether the key may be absent or `null` ([`Field`]). Keys are read in the order of their lines, and only
//! the first error is reported. A `hidden` key is read and not described: this platform does not support it, and
//! refuses it by name.

use std::fmt;

use serde_json::{Map, Value};
use utoipa::openapi::schema::SchemaType;
use utoipa::openapi::{Deprecated, Object, ObjectBuilder, OneOfBuilder, RefOr, Schema, Type};

use crate::api::error::ApiError;

/// Schemas by name.
pub(crate) type Components = Vec<(String, RefOr<Schema>)>;

/// The path of a value in a body, for error messages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FieldPath<'a> {
    above: Option<&'a FieldPath<'a>>,
    key: &'a str,
}

impl<'a> FieldPath<'a> {
    /// The body itself.
    pub(crate) const BODY: Self = Self { above: None, key: "" };

    /// The path of a key or an index in this value.
    pub(crate) fn key(&'a self, key: &'a str) -> Self {
        Self { above: Some(self), key }
    }

    /// A validation error at this path.
    pub(crate) fn error(&self, why: impl fmt::Display) -> ApiError {
        ApiError::schema(format_args!("{self}: {why}"))
    }
}

impl fmt::Display for FieldPath<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.above {
            None => Ok(()),
            Some(above) => write!(f, "{above}/{}", self.key),
        }
    }
}

/// A type of value.
pub(crate) trait BodyValue: Sized {
    /// Reads a value that is not `null`.
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError>;

    /// The schema of the type.
    fn schema() -> RefOr<Schema>;

    /// Adds the schemas that [`Self::schema`] refers to.
    fn components(_: &mut Components) {}
}

/// An object whose keys are declared.
pub(crate) trait Body: Sized {
    /// Reads the keys.
    fn read(map: &Map<String, Value>, at: &FieldPath<'_>) -> Result<Self, ApiError>;

    /// Describes the keys.
    fn describe(object: &mut Object);

    /// Adds the schemas that the description refers to.
    fn components(components: &mut Components);
}

/// A key: the type of its value, and whether it is required. A plain [`BodyValue`] is required, an `Option` may be
/// absent.
pub(crate) trait Field: Sized {
    /// The type of the field if the declaration has a default.
    type Value;
    /// Whether the key is required.
    const IS_REQUIRED: bool;

    /// Reads the key of an object at `at`.
    fn take(map: &Map<String, Value>, key: &str, at: &FieldPath<'_>) -> Result<Self, ApiError>;

    /// The value, or else the default.
    fn or(self, default: Self::Value) -> Self::Value;

    /// The schema of the value.
    fn schema() -> RefOr<Schema>;

    /// Adds the schemas that [`Self::schema`] refers to.
    fn components(components: &mut Components);
}

impl<T: BodyValue> Field for T {
    type Value = T;
    const IS_REQUIRED: bool = true;

    fn take(map: &Map<String, Value>, key: &str, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        let missing = || at.key(key).error(format_args!("property \"{key}\" is missing"));
        <Option<T> as Field>::take(map, key, at)?.ok_or_else(missing)
    }

    fn or(self, _: T) -> T {
        self
    }

    fn schema() -> RefOr<Schema> {
        <T as BodyValue>::schema()
    }

    fn components(components: &mut Components) {
        <T as BodyValue>::components(components);
    }
}

impl<T: BodyValue> Field for Option<T> {
    type Value = T;
    const IS_REQUIRED: bool = false;

    fn take(map: &Map<String, Value>, key: &str, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        let at = at.key(key);
        match map.get(key) {
            None => Ok(None),
            Some(Value::Null) => Err(at.error("value is not nullable")),
            Some(value) => T::read(value, &at).map(Some),
        }
    }

    fn or(self, default: T) -> T {
        self.unwrap_or(default)
    }

    fn schema() -> RefOr<Schema> {
        T::schema()
    }

    fn components(components: &mut Components) {
        T::components(components);
    }
}

/// A key for which `null` is the same as absence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Nullable<T>(pub(crate) Option<T>);

impl<T: BodyValue> Field for Nullable<T> {
    type Value = T;
    const IS_REQUIRED: bool = false;

    fn take(map: &Map<String, Value>, key: &str, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        let value = map.get(key).filter(|value| !value.is_null());
        value.map(|value| T::read(value, &at.key(key))).transpose().map(Self)
    }

    fn or(self, default: T) -> T {
        self.0.unwrap_or(default)
    }

    fn schema() -> RefOr<Schema> {
        let mut schema = T::schema();
        if let RefOr::T(Schema::Object(object)) = &mut schema
            && let SchemaType::Type(kind) = object.schema_type.clone()
        {
            object.schema_type = SchemaType::from_iter([kind, Type::Null]);
        }
        match schema {
            // A body of its own.
            RefOr::Ref(body) => {
                let null = ObjectBuilder::new().schema_type(Type::Null);
                OneOfBuilder::new().item(null).item(body).into()
            }
            RefOr::T(schema) => RefOr::T(schema),
        }
    }

    fn components(components: &mut Components) {
        T::components(components);
    }
}

/// A key whose invalid values are ignored instead of refused.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lenient<T>(pub(crate) Option<T>);

impl<T: BodyValue> Field for Lenient<T> {
    type Value = T;
    const IS_REQUIRED: bool = false;

    fn take(map: &Map<String, Value>, key: &str, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        Ok(Self(map.get(key).and_then(|value| T::read(value, &at.key(key)).ok())))
    }

    fn or(self, default: T) -> T {
        self.0.unwrap_or(default)
    }

    fn schema() -> RefOr<Schema> {
        T::schema()
    }

    fn components(components: &mut Components) {
        T::components(components);
    }
}

/// The lines of a doc comment as one description.
pub(crate) fn description(lines: &[&str]) -> Option<String> {
    let lines: Vec<&str> = lines.iter().map(|line| line.trim()).collect();
    (!lines.is_empty()).then(|| lines.join("\n"))
}

/// Adds a key to the description of an object.
pub(crate) fn add_key<F: Field>(object: &mut Object, key: &str, lines: &[&str], default: Option<Value>, old: bool) {
    let mut schema = F::schema();
    if let RefOr::T(Schema::Object(value)) = &mut schema {
        value.description = description(lines);
        value.default.clone_from(&default);
        value.deprecated = old.then_some(Deprecated::True);
    }
    if let RefOr::T(Schema::Array(list)) = &mut schema {
        list.description = description(lines);
        list.default.clone_from(&default);
        list.deprecated = old.then_some(Deprecated::True);
    }
    if let RefOr::T(Schema::OneOf(choice)) = &mut schema {
        choice.description = description(lines);
        choice.default = default;
    }
    object.properties.insert(key.to_owned(), schema);
    if F::IS_REQUIRED {
        object.required.push(key.to_owned());
    }
}

/// Declares a body: `"key" field: Type;`, optionally with `= default`, and with `=> hidden` or `=> deprecated`. A
/// `flatten` field is a body declared elsewhere. An `ignored` key is checked but has no effect, so it has no field.
macro_rules! body {
    (
        $(#[doc = $about:literal])*
        $vis:vis struct $name:ident {
            $(flatten $base:ident: $base_type:ty;)?
            $(
                $(#[doc = $doc:literal])*
                $key:literal $field:ident: $type:ty $(= $default:expr)? $(=> $flag:ident)?;
            )*
            $(ignored {
                $(
                    $(#[doc = $ignored_doc:literal])*
                    $ignored:literal: $ignored_type:ty $(=> $ignored_flag:ident)?;
                )*
            })?
        }
    ) => {
        $(#[doc = $about])*
        $vis struct $name {
            $($base: $base_type,)?
            $($(#[doc = $doc])* $field: $crate::api::body::shape::value!(@type $type $(= $default)?),)*
        }

        impl $crate::api::body::shape::Body for $name {
            fn read(
                map: &serde_json::Map<String, serde_json::Value>,
                at: &$crate::api::body::shape::FieldPath<'_>,
            ) -> Result<Self, $crate::api::error::ApiError> {
                $($(<$ignored_type as $crate::api::body::shape::Field>::take(map, $ignored, at)?;)*)?
                Ok(Self {
                    $($base: <$base_type as $crate::api::body::shape::Body>::read(map, at)?,)?
                    $($field: $crate::api::body::shape::value!(
                        @take <$type as $crate::api::body::shape::Field>::take(map, $key, at)?
                        $(, <$type as $crate::api::body::shape::Field>::or, $default)?
                    ),)*
                })
            }

            fn describe(object: &mut utoipa::openapi::Object) {
                $(<$base_type as $crate::api::body::shape::Body>::describe(object);)?
                $($crate::api::body::shape::value!(
                    @describe object, $type, $key, [$($doc),*], [$($default)?] $(, $flag)?
                );)*
                $($($crate::api::body::shape::value!(
                    @describe object, $ignored_type, $ignored, [$($ignored_doc),*], [] $(, $ignored_flag)?
                );)*)?
            }

            fn components(components: &mut $crate::api::body::shape::Components) {
                $(<$base_type as $crate::api::body::shape::Body>::components(components);)?
                $($crate::api::body::shape::value!(@components components, $type $(, $flag)?);)*
            }
        }

        impl $crate::api::body::shape::BodyValue for $name {
            fn read(
                value: &serde_json::Value,
                at: &$crate::api::body::shape::FieldPath<'_>,
            ) -> Result<Self, $crate::api::error::ApiError> {
                match value {
                    serde_json::Value::Object(map) => <Self as $crate::api::body::shape::Body>::read(map, at),
                    _ => Err(at.error("value must be an object")),
                }
            }

            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
                utoipa::openapi::Ref::from_schema_name(<Self as utoipa::ToSchema>::name()).into()
            }

            fn components(components: &mut $crate::api::body::shape::Components) {
                components.push((
                    <Self as utoipa::ToSchema>::name().into_owned(),
                    <Self as utoipa::PartialSchema>::schema(),
                ));
                <Self as utoipa::ToSchema>::schemas(components);
            }
        }

        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
                let description = $crate::api::body::shape::description(&[$($about),*]);
                let mut object = utoipa::openapi::ObjectBuilder::new().description(description).build();
                <Self as $crate::api::body::shape::Body>::describe(&mut object);
                object.into()
            }
        }

        impl utoipa::ToSchema for $name {
            fn schemas(schemas: &mut $crate::api::body::shape::Components) {
                <Self as $crate::api::body::shape::Body>::components(schemas);
            }
        }
    };
}
pub(crate) use body;

/// The parts of [`body!`] that depend on the options of a line.
macro_rules! value {
    (@type $type:ty) => { $type };
    (@type $type:ty = $default:expr) => { <$type as $crate::api::body::shape::Field>::Value };
    (@take $taken:expr) => { $taken };
    (@take $taken:expr, $or:expr, $default:expr) => { $or($taken, $default.into()) };
    (@describe $object:ident, $type:ty, $key:literal, $docs:tt, $default:tt, hidden) => {};
    (@describe $object:ident, $type:ty, $key:literal, [$($doc:literal),*], [$($default:expr)?] $(, $old:ident)?) => {
        $crate::api::body::shape::add_key::<$type>(
            $object,
            $key,
            &[$($doc),*],
            $crate::api::body::shape::value!(@default $($default)?),
            $crate::api::body::shape::value!(@old $($old)?),
        )
    };
    (@default) => { None };
    (@default $default:expr) => { Some(serde_json::Value::from($default)) };
    (@old) => { false };
    (@old deprecated) => { true };
    (@components $components:ident, $type:ty, hidden) => {};
    (@components $components:ident, $type:ty $(, $flag:ident)?) => {
        <$type as $crate::api::body::shape::Field>::components($components)
    };
}
pub(crate) use value;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::api::body::values::{AnyArray, Count};

    body! {
        /// Something
        /// to test with.
        struct Sample {
            /// Text.
            "text" text: String;
            "count" count: Nullable<Count<9>> = 3_u32;
            "inner" inner: Option<Inner>;
            "secret" secret: Option<AnyArray<2>> => hidden;
            ignored {
                "old": Option<bool> => deprecated;
            }
        }
    }

    body! {
        /// What is in it.
        struct Inner {
            "flag" flag: bool;
        }
    }

    fn read(body: &Value) -> Result<Sample, String> {
        let map = body.as_object().expect("an object");
        <Sample as Body>::read(map, &FieldPath::BODY).map_err(|fault| fault.message)
    }

    #[test]
    fn declared_keys_are_read() {
        let least = read(&json!({"text": "a", "more": 1})).expect("a body");
        assert_eq!((least.text.as_str(), least.count.0), ("a", 3));
        assert!(least.inner.is_none() && least.secret.is_none());
        let body = json!({"text": "", "count": 9.0, "inner": {"flag": true}, "secret": [1], "old": true});
        let all = read(&body).expect("a body");
        assert_eq!(all.count.0, 9);
        assert!(all.inner.is_some_and(|inner| inner.flag) && all.secret.is_some_and(|items| !items.is_empty));
        assert_eq!(read(&json!({"text": "a", "count": null})).expect("a body").count.0, 3);
    }

    #[test]
    fn errors_name_the_path_of_the_value() {
        for (body, fault) in [
            (json!({}), "/text: property \"text\" is missing"),
            (json!({"text": null}), "/text: value is not nullable"),
            (json!({"text": 1}), "/text: value must be a string"),
            (json!({"text": "", "count": 10}), "/count: number must be at most 9"),
            (json!({"text": "", "count": -1}), "/count: number must be at least 0"),
            (json!({"text": "", "count": 1.5}), "/count: value must be an integer"),
            (
                json!({"text": "", "count": 1_i64 << 31}),
                "/count: number must be an int32",
            ),
            (json!({"text": "", "inner": []}), "/inner: value must be an object"),
            (
                json!({"text": "", "inner": {}}),
                "/inner/flag: property \"flag\" is missing",
            ),
            (
                json!({"text": "", "inner": {"flag": 1}}),
                "/inner/flag: value must be a boolean",
            ),
            (
                json!({"text": "", "secret": [1, 2, 3]}),
                "/secret: maximum number of items is 2",
            ),
            (json!({"text": "", "old": "yes"}), "/old: value must be a boolean"),
        ] {
            let told = read(&body).err();
            assert_eq!(told, Some(format!("validation error: {fault}")), "{body}");
        }
    }

    #[test]
    fn declared_keys_are_described() {
        let schema = serde_json::to_value(<Sample as utoipa::PartialSchema>::schema()).expect("JSON");
        let want = json!({
            "type": "object",
            "description": "Something\nto test with.",
            "required": ["text"],
            "properties": {
                "text": {"type": "string", "description": "Text."},
                "count": {"type": ["integer", "null"], "format": "int32", "minimum": 0, "maximum": 9, "default": 3},
                "inner": {"$ref": "#/components/schemas/Inner"},
                "old": {"type": "boolean", "deprecated": true},
            },
        });
        assert_eq!(schema, want);
        let mut components = Components::new();
        <Sample as utoipa::ToSchema>::schemas(&mut components);
        let names: Vec<&str> = components.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["Inner"]);
    }
}
