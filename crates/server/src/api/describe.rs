//! What operations have in common in the description of the API.
//!
//! Errors that several operations can answer with are sets with a name, which a domain declares beside its errors. An
//! operation lists its sets, and what is its own. What every operation can answer is added by [`super::openapi`].

use std::collections::BTreeMap;

use utoipa::openapi::header::HeaderBuilder;
use utoipa::openapi::path::{Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::{
    Content, ContentBuilder, ObjectBuilder, Ref, RefOr, Required, Response, ResponseBuilder, Schema, Type,
};

/// A header of an error: its name, its schema, and what it says.
type DescribedHeader = (&'static str, fn() -> RefOr<Schema>, &'static str);

/// An error: its status, what it means, and its headers.
type DescribedError = (u16, &'static str, &'static [DescribedHeader]);

/// Declares sets of errors.
macro_rules! error_sets {
    ($(
        $(#[doc = $doc:literal])*
        $set:ident {
            $($status:literal $meaning:literal $({ $($header:literal: $type:ty = $about:literal),+ $(,)? })?;)+
        }
    )+) => {$(
        $(#[doc = $doc])*
        pub(in crate::api) struct $set;

        impl utoipa::IntoResponses for $set {
            fn responses() -> std::collections::BTreeMap<String, utoipa::openapi::RefOr<utoipa::openapi::Response>> {
                $crate::api::describe::errors(&[$((
                    $status,
                    $meaning,
                    &[$($(($header, <$type as utoipa::PartialSchema>::schema, $about)),+)?],
                )),+])
            }
        }
    )+};
}

pub(crate) use error_sets;

/// The responses of a set.
pub(super) fn errors(described: &[DescribedError]) -> BTreeMap<String, RefOr<Response>> {
    let responses = described.iter().map(|(status, meaning, headers)| {
        let mut response = error(meaning);
        for (name, schema, about) in *headers {
            let header = HeaderBuilder::new().schema(Some(schema())).description(Some(*about));
            response.headers.insert((*name).to_owned(), header.build().into());
        }
        (status.to_string(), response.into())
    });
    responses.collect()
}

/// An error response.
pub(super) fn error(meaning: &str) -> Response {
    let (kind, content) = error_content();
    ResponseBuilder::new()
        .description(meaning)
        .content(kind, content)
        .build()
}

/// The body that every error has, with its type.
pub(super) fn error_content() -> (&'static str, Content) {
    let schema = Ref::from_schema_name("Error");
    ("application/json", ContentBuilder::new().schema(Some(schema)).build())
}

/// A text in the path of an operation.
pub(super) fn path_parameter(name: &str, about: Option<&str>, pattern: Option<&str>) -> Parameter {
    let text = ObjectBuilder::new().schema_type(Type::String).pattern(pattern);
    ParameterBuilder::new()
        .name(name)
        .parameter_in(ParameterIn::Path)
        .description(about)
        .required(Required::True)
        .schema(Some(text))
        .build()
}
