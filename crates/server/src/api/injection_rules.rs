//! `/injection-rules`: the saved injection rules of the caller.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::{FromRequestParts, Path, State};
use axum::response::Response;
use http::{StatusCode, request};
use model::injection::spec::{Injection, InjectionItem, SAVED};
use model::limits::INJECTION_RULES_MAX;
use model::secret::Secret;
use serde::Serialize;
use store::Store;
use store::error::StoreError;
use store::injection_rules::{InjectionRuleChange, InjectionRuleRow};
use utoipa::openapi::path::{Parameter, ParameterIn};
use utoipa::{IntoParams, ToSchema};

use super::auth::Caller;
use super::body::RequiredBody;
use super::body::shape::{Nullable, body};
use super::body::values::Name;
use super::describe::{error_sets, path_parameter};
use super::error::ApiError;
use super::injection_values::InjectionValue;
use super::json::json;
use super::state::ApiState;
use crate::clock::{Clock, rfc3339};
use crate::injections::Injections;
use crate::sandboxes::Sandboxes;

/// Prefix of the ids of rules.
const ID_PREFIX: &str = "rule_";
/// Random bytes of the id of a rule.
const ID_BYTES: usize = 10;

body! {
    /// A rule to save.
    pub(crate) struct NewInjectionRule {
        /// The name, unique for the user.
        "name" name: Name;
        /// What it injects.
        "injection" injection: InjectionValue;
    }
}

body! {
    /// Changes of a rule. What is absent stays as it is.
    pub(crate) struct InjectionRuleUpdate {
        /// The name, unique for the user.
        "name" name: Nullable<Name>;
        /// What it injects, which replaces the injection before as a whole.
        "injection" injection: Nullable<InjectionValue>;
    }
}

/// An injection as it is shown.
#[derive(Serialize, ToSchema)]
#[schema(as = Injection)]
pub(crate) struct ShownInjection {
    /// The type, in the word that the request had.
    #[serde(rename = "type")]
    kind: String,
    /// The id of a saved rule.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    base_url: Option<String>,
    /// Masked, unless the owner has signed the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    headers: Option<BTreeMap<String, String>>,
    /// Masked.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    api_key: Option<String>,
    /// Masked.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    token: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    if_headers: Option<BTreeMap<String, String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    if_queries: Option<BTreeMap<String, String>>,
}

impl ShownInjection {
    /// An injection without its secrets; with `show_headers`, its headers are shown.
    fn new(injection: &Injection, show_headers: bool) -> Self {
        let masked = injection.masked(show_headers);
        let text = |secret: Secret| secret.expose().to_owned();
        let texts = |headers: BTreeMap<String, Secret>| headers.into_iter().map(|(name, value)| (name, text(value)));
        Self {
            kind: masked.kind,
            id: None,
            base_url: masked.base_url,
            headers: masked.headers.map(|headers| texts(headers).collect()),
            api_key: masked.api_key.map(text),
            token: masked.token.map(text),
            if_headers: masked.if_headers,
            if_queries: masked.if_queries,
        }
    }

    /// An injection of a sandbox, without secrets.
    pub(crate) fn of_item(item: &InjectionItem) -> Self {
        match item {
            InjectionItem::Own(injection) => Self::new(injection, false),
            InjectionItem::Saved(saved) => Self {
                kind: SAVED.to_owned(),
                id: Some(saved.id.clone()),
                base_url: None,
                headers: None,
                api_key: None,
                token: None,
                if_headers: None,
                if_queries: None,
            },
        }
    }
}

/// A saved rule.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct InjectionRule {
    #[serde(rename = "ruleID")]
    rule_id: String,
    name: String,
    #[schema(format = DateTime)]
    created_at: String,
    #[schema(format = DateTime)]
    updated_at: String,
    injection: ShownInjection,
}

impl InjectionRule {
    fn new(injections: &Injections, caller: &RuleCaller, row: InjectionRuleRow) -> Result<Self, ApiError> {
        let injection = injections.open_rule(&row).map_err(ApiError::failed)?;
        Ok(Self {
            rule_id: row.id,
            name: row.name,
            created_at: rfc3339(row.created_us),
            updated_at: rfc3339(row.updated_us),
            injection: ShownInjection::new(&injection, caller.0.is_signed),
        })
    }
}

/// The caller of an operation on rules. The operator may require that such requests are signed.
pub(crate) struct RuleCaller(Caller);

impl FromRequestParts<ApiState> for RuleCaller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, state: &ApiState) -> Result<Self, ApiError> {
        let caller = Caller::from_request_parts(parts, state).await?;
        if state.signatures.rules_require_it() && !caller.is_signed {
            return Err(ApiError::unauthenticated(
                "this platform requires requests about injection rules to be signed with an access key",
            ));
        }
        Ok(Self(caller))
    }
}

/// The id of a rule in a path. Texts that no rule has as its id are ids of no rule.
#[derive(Debug)]
pub(crate) struct RulePath(String);

impl IntoParams for RulePath {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        vec![path_parameter("ruleID", Some("The id of the rule."), None)]
    }
}

impl<S: Send + Sync> FromRequestParts<S> for RulePath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, state: &S) -> Result<Self, ApiError> {
        let path = Path::<String>::from_request_parts(parts, state).await;
        let Path(text) = path.map_err(|_| ApiError::invalid("invalid rule ID: it is not text"))?;
        if text.contains('\0') {
            return Err(no_rule(&text));
        }
        Ok(Self(text))
    }
}

fn no_rule(id: &str) -> ApiError {
    ApiError::no_key("injection rule", id)
}

fn name_taken(name: &str) -> ApiError {
    ApiError::taken(format!("you have an injection rule with the name \"{name}\" already"))
}

/// Lists the rules of the user, oldest first.
#[utoipa::path(
    get,
    path = "/injection-rules",
    tag = "injection rules",
    responses((status = 200, description = "The rules", body = Vec<InjectionRule>))
)]
pub(crate) async fn list_injection_rules(
    State(store): State<Store>,
    State(injections): State<Arc<Injections>>,
    caller: RuleCaller,
) -> Result<Response, ApiError> {
    let rows = store.injection_rule_list(&caller.0.user).await?;
    let rules = rows
        .into_iter()
        .map(|row| InjectionRule::new(&injections, &caller, row));
    json(StatusCode::OK, &rules.collect::<Result<Vec<_>, _>>()?)
}

/// Saves a rule.
#[utoipa::path(
    post,
    path = "/injection-rules",
    tag = "injection rules",
    request_body(content = NewInjectionRule),
    responses(
        (status = 201, description = "The rule was saved", body = InjectionRule),
        (status = 409, description = "The user has a rule with this name"),
    )
)]
pub(crate) async fn create_injection_rule(
    State(store): State<Store>,
    State(clock): State<Clock>,
    State(injections): State<Arc<Injections>>,
    caller: RuleCaller,
    body: RequiredBody<NewInjectionRule>,
) -> Result<Response, ApiError> {
    let NewInjectionRule {
        name: Name(name),
        injection,
    } = body.read()?;
    let injection = checked(&injections, injection)?;
    if store.injection_rule_count(&caller.0.user).await? >= INJECTION_RULES_MAX {
        let why = format!("you have {INJECTION_RULES_MAX} injection rules, the maximum: delete one first");
        return Err(ApiError::invalid(why));
    }
    let mut random = [0; ID_BYTES];
    getrandom::fill(&mut random).map_err(ApiError::failed)?;
    let id = format!("{ID_PREFIX}{}", hex::encode(random));
    let now_us = clock.now_us();
    let sealed = injections.seal_rule(&id, &injection);
    let row = InjectionRuleRow {
        injection_sealed: sealed.map_err(ApiError::failed)?,
        id,
        user_id: caller.0.user.clone(),
        name,
        created_us: now_us,
        updated_us: now_us,
    };
    match store.injection_rule_insert(&row).await {
        Err(StoreError::Conflict { .. }) => return Err(name_taken(&row.name)),
        inserted => inserted?,
    }
    tracing::info!(rule.id = row.id, "created an injection rule");
    json(StatusCode::CREATED, &InjectionRule::new(&injections, &caller, row)?)
}

/// The injection of a request, if it is valid.
fn checked(injections: &Injections, InjectionValue(settings): InjectionValue) -> Result<Injection, ApiError> {
    let checked = settings.injection().and_then(|injection| {
        injections.check_one(&injection)?;
        Ok(injection)
    });
    checked.map_err(|why| ApiError::invalid(format!("injection.{why}")))
}

error_sets! {
    /// There is no such rule.
    NoRule {
        404 "The user has no such rule";
    }
}

/// Returns a rule.
#[utoipa::path(
    get,
    path = "/injection-rules/{ruleID}",
    tag = "injection rules",
    params(RulePath),
    responses((status = 200, description = "The rule", body = InjectionRule), NoRule)
)]
pub(crate) async fn get_injection_rule(
    State(store): State<Store>,
    State(injections): State<Arc<Injections>>,
    caller: RuleCaller,
    RulePath(id): RulePath,
) -> Result<Response, ApiError> {
    match store.injection_rule_of(&caller.0.user, &id).await? {
        Some(row) => json(StatusCode::OK, &InjectionRule::new(&injections, &caller, row)?),
        None => Err(no_rule(&id)),
    }
}

/// Changes a rule. Running sandboxes that refer to it use the change for new connections.
#[utoipa::path(
    put,
    path = "/injection-rules/{ruleID}",
    tag = "injection rules",
    params(RulePath),
    request_body(content = InjectionRuleUpdate),
    responses(
        (status = 200, description = "The changed rule", body = InjectionRule),
        (status = 409, description = "The user has another rule with this name"),
        NoRule,
    )
)]
pub(crate) async fn update_injection_rule(
    State(store): State<Store>,
    State(clock): State<Clock>,
    State(injections): State<Arc<Injections>>,
    State(sandboxes): State<Arc<Sandboxes>>,
    caller: RuleCaller,
    RulePath(id): RulePath,
    body: RequiredBody<InjectionRuleUpdate>,
) -> Result<Response, ApiError> {
    let body = body.read()?;
    let name = body.name.0.map(|Name(name)| name);
    let injection = body.injection.0.map(|injection| checked(&injections, injection));
    let injection = injection.transpose()?;
    let sealed = injection.as_ref().map(|injection| injections.seal_rule(&id, injection));
    let change = InjectionRuleChange {
        injection_sealed: sealed.transpose().map_err(ApiError::failed)?,
        name,
        updated_us: clock.now_us(),
    };
    let row = match store.injection_rule_update(&caller.0.user, &id, &change).await {
        Err(StoreError::Conflict { .. }) => return Err(name_taken(change.name.as_deref().unwrap_or_default())),
        updated => updated?.ok_or_else(|| no_rule(&id))?,
    };
    if injection.is_some() {
        sandboxes.apply_rule(&id).await;
    }
    json(StatusCode::OK, &InjectionRule::new(&injections, &caller, row)?)
}

/// Deletes a rule. Running sandboxes that refer to it no longer use it for new connections.
#[utoipa::path(
    delete,
    path = "/injection-rules/{ruleID}",
    tag = "injection rules",
    params(RulePath),
    responses((status = 204, description = "The rule was deleted"), NoRule)
)]
pub(crate) async fn delete_injection_rule(
    State(store): State<Store>,
    State(sandboxes): State<Arc<Sandboxes>>,
    caller: RuleCaller,
    RulePath(id): RulePath,
) -> Result<StatusCode, ApiError> {
    if !store.injection_rule_delete(&caller.0.user, &id).await? {
        return Err(no_rule(&id));
    }
    tracing::info!(rule.id = id, "deleted an injection rule");
    sandboxes.apply_rule(&id).await;
    Ok(StatusCode::NO_CONTENT)
}
