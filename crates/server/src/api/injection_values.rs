//! Injections in requests. The API document has one schema for each kind of type, because each has keys of its own.

use model::injection::provider::{Credential, Providers};
use model::injection::spec::{HTTP, Injection, InjectionItem, SAVED, SavedInjection};
use model::secret::Secret;
use serde_json::{Value, json};
use utoipa::openapi::schema::{AnyOfBuilder, SchemaType};
use utoipa::openapi::{Object, ObjectBuilder, Ref, RefOr, Schema, Type};

use super::body::shape::{Body as _, BodyValue, Components, FieldPath, Nullable, body};
use super::body::values::Texts;
use super::error::ApiError;

body! {
    /// Headers that are set on HTTPS requests of a sandbox. Which keys are required depends on `type`.
    pub(crate) struct InjectionSettings {
        /// `http` for headers of your own, or a provider: `openai` (`provider_a`), `anthropic` (`provider_b`), `gemini`
        /// (`provider_c`), `qiniu` (`provider_own`), `sufy`, `github` (`code_host`), or one of the operator. In a sandbox
        /// also `id`, for a saved rule.
        "type" kind: String;
        /// The id of a saved rule, with type `id`.
        "id" id: Nullable<String>;
        /// The requests that it is for: `[https://]host[:port][/path]`, in which the path may end with `*`. For providers,
        /// the default is the provider's host.
        "base_url" base_url: Nullable<String>;
        /// The headers to set.
        "headers" headers: Nullable<Texts>;
        /// The key.
        "api_key" api_key: Nullable<String>;
        /// The token.
        "token" token: Nullable<String>;
        /// Headers that requests must have, with exactly these values.
        "if_headers" if_headers: Nullable<Texts>;
        /// Query parameters that requests must have, with exactly these values.
        "if_queries" if_queries: Nullable<Texts>;
    }
}

impl InjectionSettings {
    /// The injection, which is not checked yet.
    ///
    /// # Errors
    /// With what is wrong, for the client.
    pub(super) fn injection(self) -> Result<Injection, String> {
        if self.id.0.is_some() {
            return Err(format!("id: type {} does not have it", self.kind));
        }
        let secrets = |texts: Texts| {
            texts
                .into_iter()
                .map(|(name, text)| (name, Secret::new(text)))
                .collect()
        };
        Ok(Injection {
            kind: self.kind,
            base_url: self.base_url.0,
            headers: self.headers.0.map(secrets),
            api_key: self.api_key.0.map(Secret::new),
            token: self.token.0.map(Secret::new),
            if_headers: self.if_headers.0,
            if_queries: self.if_queries.0,
        })
    }

    /// The injection or the reference, which is not checked yet.
    ///
    /// # Errors
    /// With what is wrong, for the client.
    pub(super) fn item(self) -> Result<InjectionItem, String> {
        if self.kind != SAVED {
            return self.injection().map(InjectionItem::Own);
        }
        match self.id.0 {
            Some(id) => Ok(InjectionItem::Saved(SavedInjection::new(id))),
            None => Err("id: type id requires it".to_owned()),
        }
    }
}

/// An injection of a rule.
pub(crate) struct InjectionValue(pub(crate) InjectionSettings);

/// An injection of a sandbox, which may be that of a saved rule.
pub(crate) struct ItemValue(pub(crate) InjectionSettings);

impl BodyValue for InjectionValue {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        <InjectionSettings as BodyValue>::read(value, at).map(Self)
    }

    fn schema() -> RefOr<Schema> {
        Ref::from_schema_name(RULE).into()
    }

    fn components(components: &mut Components) {
        describe(components);
    }
}

impl BodyValue for ItemValue {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        <InjectionSettings as BodyValue>::read(value, at).map(Self)
    }

    fn schema() -> RefOr<Schema> {
        Ref::from_schema_name(ITEM).into()
    }

    fn components(components: &mut Components) {
        describe(components);
    }
}

/// What can be injected in a sandbox.
const ITEM: &str = "SandboxInjection";
/// What a rule can inject.
const RULE: &str = "RuleInjection";

/// A kind of type.
struct Kind {
    name: &'static str,
    about: &'static str,
    /// The types; empty for those that an operator adds.
    types: Vec<String>,
    required: &'static [&'static str],
    optional: &'static [&'static str],
    example: Value,
}

/// The kinds that a rule can have.
fn kinds() -> Vec<Kind> {
    let types = |credential| -> Vec<String> {
        let providers = Providers::default();
        let is_of = |name: &&str| {
            providers
                .get(name)
                .is_some_and(|provider| provider.credential == credential)
        };
        providers.names().filter(is_of).map(str::to_owned).collect()
    };
    vec![
        Kind {
            name: "HttpInjection",
            about: "Headers of your own, for any host: type `http`.",
            types: vec![HTTP.to_owned()],
            required: &["base_url"],
            optional: &["headers", "if_headers", "if_queries"],
            example: json!({
                "type": HTTP,
                "base_url": "https://api.example.com/v1/*",
                "headers": {"Authorization": "Bearer a-secret"},
            }),
        },
        Kind {
            name: "AiProviderInjection",
            about: "The key for an AI provider, in the headers that it expects.",
            types: types(Credential::ApiKey),
            required: &["api_key"],
            optional: &["base_url", "if_headers", "if_queries"],
            example: json!({"type": "openai", "api_key": "sk-a-secret"}),
        },
        Kind {
            name: "CodeHostInjection",
            about: "The token for a code host, for git and its API.",
            types: types(Credential::Token),
            required: &["token"],
            optional: &["base_url", "if_headers", "if_queries"],
            example: json!({"type": "github", "token": "ghp_a_secret"}),
        },
        Kind {
            name: "OperatorProviderInjection",
            about: "The key for a provider that the operator has added, whose name is the type.",
            types: Vec::new(),
            required: &["api_key"],
            optional: &["base_url", "if_headers", "if_queries"],
            example: json!({"type": "internal_api", "api_key": "a-secret"}),
        },
    ]
}

/// The kind that only sandboxes can have.
fn saved() -> Kind {
    Kind {
        name: "SavedInjection",
        about: "That of a saved rule, as it is when a connection is made.",
        types: vec![SAVED.to_owned()],
        required: &["id"],
        optional: &[],
        example: json!({"type": SAVED, "id": "rule_0123456789abcdef0123"}),
    }
}

impl Kind {
    #[expect(
        deprecated,
        reason = "its successor is a list, which not all readers of the document support"
    )]
    fn schema(&self, all: &Object) -> RefOr<Schema> {
        let mut object = ObjectBuilder::new()
            .description(Some(self.about))
            .example(Some(self.example.clone()))
            .build();
        for key in ["type"].iter().chain(self.required).chain(self.optional) {
            let Some(mut schema) = all.properties.get(*key).cloned() else {
                continue;
            };
            if let RefOr::T(Schema::Object(value)) = &mut schema {
                if *key == "type" {
                    value.enum_values =
                        (!self.types.is_empty()).then(|| self.types.iter().map(|one| json!(one)).collect());
                    value.description = None;
                } else if self.required.contains(key) {
                    value.schema_type = SchemaType::Type(Type::String);
                }
            }
            object.properties.insert((*key).to_owned(), schema);
        }
        object.required = ["type"]
            .iter()
            .chain(self.required)
            .map(|key| (*key).to_owned())
            .collect();
        object.into()
    }
}

/// Adds the schemas of injections.
fn describe(components: &mut Components) {
    let mut all = Object::new();
    InjectionSettings::describe(&mut all);
    let rule = kinds();
    let about = "Headers that are set on HTTPS requests of a sandbox. Which keys there are depends on the type.";
    let any_of = |kinds: &mut dyn Iterator<Item = &Kind>| -> RefOr<Schema> {
        let any = AnyOfBuilder::new().description(Some(about));
        kinds
            .fold(any, |any, kind| any.item(Ref::from_schema_name(kind.name)))
            .into()
    };
    let saved = saved();
    components.push((RULE.to_owned(), any_of(&mut rule.iter())));
    components.push((ITEM.to_owned(), any_of(&mut [&saved].into_iter().chain(&rule))));
    for kind in rule.iter().chain([&saved]) {
        components.push((kind.name.to_owned(), kind.schema(&all)));
    }
}
