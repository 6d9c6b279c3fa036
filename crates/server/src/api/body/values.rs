//! Types of values in bodies.

use std::collections::BTreeMap;

use model::header_rules::{
    RULE_DOMAIN_MAX, RULE_DOMAINS_MAX, RULE_HEADER_NAME_MAX, RULE_HEADER_VALUE_MAX, RULE_HEADERS_MAX,
    RULES_OF_DOMAIN_MAX, RuleSpec, RulesSpec, TransformSpec,
};
use model::limits::{
    DEFAULT_MAX_LIFETIME_S, DNS_SERVER_MAX, EGRESS_ENTRY_MAX, HOST_MASK_MAX, NAME_MAX, PROXY_ADDRESS_MAX, PROXY_CA_MAX,
    PROXY_CREDENTIAL_MAX, PROXY_SERVER_NAME_MAX, is_name,
};
use model::repository::{MountPath, REPOSITORY_TOKEN_MAX, RepositoryUrl};
use model::secret::Secret;
use protocol::agent;
use serde_json::Value;
use utoipa::openapi::extensions::ExtensionsBuilder;
use utoipa::openapi::schema::{AdditionalProperties, ArrayBuilder, KnownFormat, SchemaFormat};
use utoipa::openapi::{ObjectBuilder, RefOr, Schema, Type};

use super::shape::{BodyValue, Components, Field, FieldPath, body};
use crate::admission::quota::TeamQuota;
use crate::api::error::ApiError;

/// Marks a timeout in a schema whose maximum is configured by the operator.
pub(crate) const LIFETIME: &str = "x-longest-lifetime";

/// A schema of one type.
fn schema_of(kind: Type) -> ObjectBuilder {
    ObjectBuilder::new().schema_type(kind)
}

/// A schema of strings with an example.
#[expect(
    deprecated,
    reason = "its successor is a list, which not all readers of the document support"
)]
fn example(text: &str) -> ObjectBuilder {
    schema_of(Type::String).example(Some(text.into()))
}

impl BodyValue for bool {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        value.as_bool().ok_or_else(|| at.error("value must be a boolean"))
    }

    fn schema() -> RefOr<Schema> {
        schema_of(Type::Boolean).into()
    }
}

impl BodyValue for String {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        let text = value.as_str().ok_or_else(|| at.error("value must be a string"))?;
        Ok(text.to_owned())
    }

    fn schema() -> RefOr<Schema> {
        schema_of(Type::String).into()
    }
}

/// The name of a team, a key or a token.
pub(crate) struct Name(pub(crate) String);

impl BodyValue for Name {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        let name = String::read(value, at)?;
        if is_name(&name) {
            return Ok(Self(name));
        }
        Err(at.error(format_args!(
            "value must have 1 to {NAME_MAX} characters, none of them a control character or outer space"
        )))
    }

    fn schema() -> RefOr<Schema> {
        let pattern = r"^[^\s\x00-\x1f\x7f-\x9f]([^\x00-\x1f\x7f-\x9f]*[^\s\x00-\x1f\x7f-\x9f])?$";
        schema_of(Type::String)
            .min_length(Some(1))
            .max_length(Some(NAME_MAX))
            .pattern(Some(pattern))
            .into()
    }
}

/// A template reference. Its syntax is checked later, when it is resolved.
pub(crate) struct TemplateReference(pub(crate) String);

impl BodyValue for TemplateReference {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        String::read(value, at).map(Self)
    }

    fn schema() -> RefOr<Schema> {
        example("base")
            .pattern(Some(r"^([A-Za-z0-9_-]+/)?[A-Za-z0-9_-]+(:[A-Za-z0-9_.-]+)?$"))
            .into()
    }
}

/// Reads a non-negative integer of 32 bits. It may be written `1.0`.
fn read_whole(value: &Value, at: &FieldPath<'_>) -> Result<u32, ApiError> {
    let Value::Number(number) = value else {
        return Err(at.error("value must be an integer"));
    };
    let whole = match (number.as_i64(), number.as_f64()) {
        (Some(whole), _) => whole,
        // Exact, as every whole number of 32 bits is a double.
        #[expect(
            clippy::cast_possible_truncation,
            reason = "checked to be whole and small just before"
        )]
        (None, Some(float)) if float.fract() == 0.0 && float.abs() < 9e15 => float as i64,
        (None, Some(float)) if float.fract() != 0.0 => return Err(at.error("value must be an integer")),
        (None, _) => return Err(at.error("number must be an int32")),
    };
    if whole < 0 {
        return Err(at.error("number must be at least 0"));
    }
    match i32::try_from(whole) {
        Ok(whole) => Ok(whole.unsigned_abs()),
        Err(_) => Err(at.error("number must be an int32")),
    }
}

fn integer(least: u32, most: u32) -> ObjectBuilder {
    schema_of(Type::Integer)
        .format(Some(SchemaFormat::KnownFormat(KnownFormat::Int32)))
        .minimum(Some(least))
        .maximum(Some(most))
}

/// A number from 0 to `MAX`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Count<const MAX: u32>(pub(crate) u32);

impl<const MAX: u32> From<u32> for Count<MAX> {
    fn from(count: u32) -> Self {
        Self(count)
    }
}

impl<const MAX: u32> BodyValue for Count<MAX> {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        let count = read_whole(value, at)?;
        if count > MAX {
            return Err(at.error(format_args!("number must be at most {MAX}")));
        }
        Ok(Self(count))
    }

    fn schema() -> RefOr<Schema> {
        integer(0, MAX).into()
    }
}

/// A number from `MIN` to `MAX`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Within<const MIN: u32, const MAX: u32>(pub(crate) u32);

impl<const MIN: u32, const MAX: u32> From<u32> for Within<MIN, MAX> {
    fn from(number: u32) -> Self {
        Self(number)
    }
}

impl<const MIN: u32, const MAX: u32> BodyValue for Within<MIN, MAX> {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        let number = read_whole(value, at)?;
        if (MIN..=MAX).contains(&number) {
            Ok(Self(number))
        } else {
            Err(at.error(format_args!("number must be from {MIN} to {MAX}")))
        }
    }

    fn schema() -> RefOr<Schema> {
        integer(MIN, MAX).into()
    }
}

/// A number of at least `MIN`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AtLeast<const MIN: u32>(pub(crate) u32);

impl<const MIN: u32> BodyValue for AtLeast<MIN> {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        let number = read_whole(value, at)?;
        if number < MIN {
            return Err(at.error(format_args!("number must be at least {MIN}")));
        }
        Ok(Self(number))
    }

    fn schema() -> RefOr<Schema> {
        schema_of(Type::Integer)
            .format(Some(SchemaFormat::KnownFormat(KnownFormat::Int32)))
            .minimum(Some(MIN))
            .into()
    }
}

/// A text of at most `MAX` characters.
pub(crate) struct ShortString<const MAX: usize>(pub(crate) String);

impl<const MAX: usize> BodyValue for ShortString<MAX> {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        read_short(value, at, MAX).map(Self)
    }

    fn schema() -> RefOr<Schema> {
        schema_of(Type::String).max_length(Some(MAX)).into()
    }
}

/// The timeout of a sandbox, in seconds: at least `MIN`, and at most the maximum lifetime of its team. The latter is
/// known only after authentication, and is checked by [`Self::within`] or by what the value is handed to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lifetime<const MIN: u32>(u32);

impl<const MIN: u32> Lifetime<MIN> {
    /// The seconds, if they are within the limits of the team.
    pub(crate) fn within(self, quota: &TeamQuota) -> Result<u32, ApiError> {
        quota
            .lifetime(self.0, MIN)
            .map_err(|error| ApiError::invalid(error.to_string()))
    }

    /// The seconds, which are not checked yet.
    pub(crate) fn unchecked(self) -> u32 {
        self.0
    }
}

impl<const MIN: u32> From<u32> for Lifetime<MIN> {
    fn from(seconds: u32) -> Self {
        Self(seconds)
    }
}

impl<const MIN: u32> BodyValue for Lifetime<MIN> {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        read_whole(value, at).map(Self)
    }

    fn schema() -> RefOr<Schema> {
        let marked = ExtensionsBuilder::new().add(LIFETIME, true).build();
        integer(MIN, DEFAULT_MAX_LIFETIME_S).extensions(Some(marked)).into()
    }
}

/// Reads a string of at most `longest` characters.
fn read_short(value: &Value, at: &FieldPath<'_>, longest: usize) -> Result<String, ApiError> {
    let text = String::read(value, at)?;
    check_length(&text, at, longest)?;
    Ok(text)
}

/// Refuses a string of more than `longest` characters.
fn check_length(text: &str, at: &FieldPath<'_>, longest: usize) -> Result<(), ApiError> {
    if text.chars().count() > longest {
        return Err(at.error(format_args!("maximum string length is {longest}")));
    }
    Ok(())
}

/// An address, a network or a domain. Its syntax is checked later, together with other keys.
#[derive(Debug)]
pub(crate) struct EgressEntry(pub(crate) String);

impl BodyValue for EgressEntry {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        read_short(value, at, EGRESS_ENTRY_MAX).map(Self)
    }

    fn schema() -> RefOr<Schema> {
        example("203.0.113.0/24").max_length(Some(EGRESS_ENTRY_MAX)).into()
    }
}

/// The IPv4 address of a DNS server. Its syntax is checked later.
#[derive(Debug)]
pub(crate) struct DnsServer(pub(crate) String);

impl BodyValue for DnsServer {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        read_short(value, at, DNS_SERVER_MAX).map(Self)
    }

    fn schema() -> RefOr<Schema> {
        example("1.1.1.1").max_length(Some(DNS_SERVER_MAX)).into()
    }
}

/// The host that requests to a sandbox have inside. Its syntax is checked later.
#[derive(Debug)]
pub(crate) struct RequestHost(pub(crate) String);

impl BodyValue for RequestHost {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        read_short(value, at, HOST_MASK_MAX).map(Self)
    }

    fn schema() -> RefOr<Schema> {
        example("localhost:${PORT}").max_length(Some(HOST_MASK_MAX)).into()
    }
}

/// The host and the port of a proxy. Its syntax is checked later.
#[derive(Debug)]
pub(crate) struct ProxyAddress(pub(crate) String);

impl BodyValue for ProxyAddress {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        read_short(value, at, PROXY_ADDRESS_MAX).map(Self)
    }

    fn schema() -> RefOr<Schema> {
        example("proxy.example.com:1080")
            .max_length(Some(PROXY_ADDRESS_MAX))
            .into()
    }
}

/// A user or a password for a proxy.
pub(crate) struct ProxyCredential(pub(crate) String);

impl BodyValue for ProxyCredential {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        read_short(value, at, PROXY_CREDENTIAL_MAX).map(Self)
    }

    fn schema() -> RefOr<Schema> {
        example("user").max_length(Some(PROXY_CREDENTIAL_MAX)).into()
    }
}

/// The name in the certificate of a proxy. Its syntax is checked later.
#[derive(Debug)]
pub(crate) struct ProxyServerName(pub(crate) String);

impl BodyValue for ProxyServerName {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        read_short(value, at, PROXY_SERVER_NAME_MAX).map(Self)
    }

    fn schema() -> RefOr<Schema> {
        example("proxy.example.com")
            .max_length(Some(PROXY_SERVER_NAME_MAX))
            .into()
    }
}

/// Certificates in PEM. They are read later.
#[derive(Debug)]
pub(crate) struct ProxyCertificates(pub(crate) String);

impl BodyValue for ProxyCertificates {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        read_short(value, at, PROXY_CA_MAX).map(Self)
    }

    fn schema() -> RefOr<Schema> {
        example("-----BEGIN CERTIFICATE-----")
            .max_length(Some(PROXY_CA_MAX))
            .into()
    }
}

/// A port inside whose server speaks TLS.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HttpsPort(pub(crate) u16);

impl BodyValue for HttpsPort {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        match u16::try_from(read_whole(value, at)?) {
            Ok(agent::PORT) => Err(at.error(format_args!("the agent on port {} speaks no TLS", agent::PORT))),
            Ok(port) if port > 0 => Ok(Self(port)),
            Ok(_) | Err(_) => Err(at.error("number must be a port, from 1 to 65535")),
        }
    }

    #[expect(
        deprecated,
        reason = "its successor is a list, which not all readers of the document support"
    )]
    fn schema() -> RefOr<Schema> {
        integer(1, u16::MAX.into()).example(Some(8443.into())).into()
    }
}

/// An array of `MIN` to `MAX` items.
#[derive(Debug)]
pub(crate) struct List<T, const MIN: usize, const MAX: usize>(pub(crate) Vec<T>);

impl<T: BodyValue, const MIN: usize, const MAX: usize> BodyValue for List<T, MIN, MAX> {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        let items = value.as_array().ok_or_else(|| at.error("value must be an array"))?;
        if items.len() < MIN {
            return Err(at.error(format_args!("minimum number of items is {MIN}")));
        }
        if items.len() > MAX {
            return Err(at.error(format_args!("maximum number of items is {MAX}")));
        }
        let items = items.iter().enumerate();
        let items = items.map(|(index, item)| T::read(item, &at.key(&index.to_string())));
        items.collect::<Result<_, _>>().map(Self)
    }

    fn schema() -> RefOr<Schema> {
        let least = (MIN > 0).then_some(MIN);
        ArrayBuilder::new()
            .items(T::schema())
            .min_items(least)
            .max_items(Some(MAX))
            .into()
    }

    fn components(components: &mut Components) {
        T::components(components);
    }
}

/// An object of strings.
pub(crate) type Texts = BTreeMap<String, String>;

impl BodyValue for Texts {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        let Value::Object(map) = value else {
            return Err(at.error("value must be an object"));
        };
        map.keys()
            .map(|key| Ok((key.clone(), <String as Field>::take(map, key, at)?)))
            .collect()
    }

    fn schema() -> RefOr<Schema> {
        texts(schema_of(Type::String), schema_of(Type::String))
    }
}

fn texts(names: ObjectBuilder, values: ObjectBuilder) -> RefOr<Schema> {
    let values = AdditionalProperties::RefOr(values.build().into());
    ObjectBuilder::new()
        .property_names(Some(names.build()))
        .additional_properties(Some(values))
        .into()
}

/// Environment variables. Names and values are checked later, after the template is resolved.
pub(crate) struct Variables(pub(crate) Texts);

impl BodyValue for Variables {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        Texts::read(value, at).map(Self)
    }

    fn schema() -> RefOr<Schema> {
        texts(
            schema_of(Type::String).pattern(Some(r"^[^=\x00]+$")),
            schema_of(Type::String).pattern(Some(r"^[^\x00]*$")),
        )
    }
}

/// The type of a resource.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ResourceType;

impl BodyValue for ResourceType {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        match String::read(value, at)?.as_str() {
            "code_host_repository" | "github_repository" => Ok(Self),
            _ => Err(at.error("value must be code_host_repository or github_repository; there are no other resources")),
        }
    }

    fn schema() -> RefOr<Schema> {
        let words = ["code_host_repository", "github_repository"];
        schema_of(Type::String).enum_values(Some(words)).into()
    }
}

/// The address of a repository.
#[derive(Debug)]
pub(crate) struct RepositoryAddress(pub(crate) RepositoryUrl);

impl BodyValue for RepositoryAddress {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        let url = String::read(value, at)?.parse::<RepositoryUrl>();
        url.map(Self).map_err(|error| at.error(error))
    }

    fn schema() -> RefOr<Schema> {
        example("https://github.com/octocat/hello-world").into()
    }
}

/// The path of a working tree.
#[derive(Debug)]
pub(crate) struct WorkingTreePath(pub(crate) MountPath);

impl BodyValue for WorkingTreePath {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        let path = String::read(value, at)?.parse::<MountPath>();
        path.map(Self).map_err(|error| at.error(error))
    }

    fn schema() -> RefOr<Schema> {
        example("/home/user/hello-world").into()
    }
}

/// A token for a code host.
#[derive(Debug)]
pub(crate) struct RepositoryToken(pub(crate) Secret);

impl BodyValue for RepositoryToken {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        let token = String::read(value, at)?;
        let fits = (1..=REPOSITORY_TOKEN_MAX).contains(&token.len());
        if !fits || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(at.error(format_args!(
                "value must have 1 to {REPOSITORY_TOKEN_MAX} visible ASCII characters"
            )));
        }
        Ok(Self(Secret::new(token)))
    }

    fn schema() -> RefOr<Schema> {
        schema_of(Type::String)
            .min_length(Some(1))
            .max_length(Some(REPOSITORY_TOKEN_MAX))
            .into()
    }
}

/// Headers by domain. Their syntax is checked later, together with other keys.
#[derive(Debug)]
pub(crate) struct HeaderRulesByDomain(pub(crate) RulesSpec);

impl BodyValue for HeaderRulesByDomain {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        let Value::Object(domains) = value else {
            return Err(at.error("value must be an object"));
        };
        if domains.len() > RULE_DOMAINS_MAX {
            return Err(at.error(format_args!("maximum number of domains is {RULE_DOMAINS_MAX}")));
        }
        let mut rules = RulesSpec::new();
        for (domain, of_domain) in domains {
            let at = at.key(domain);
            check_length(domain, &at, RULE_DOMAIN_MAX)?;
            let List(of_domain) = List::<HeaderRuleBody, 0, RULES_OF_DOMAIN_MAX>::read(of_domain, &at)?;
            let of_domain = of_domain.into_iter().map(HeaderRuleBody::spec);
            rules.insert(domain.clone(), of_domain.collect());
        }
        Ok(Self(rules))
    }

    fn schema() -> RefOr<Schema> {
        let rules = <List<HeaderRuleBody, 0, RULES_OF_DOMAIN_MAX> as BodyValue>::schema();
        ObjectBuilder::new()
            .property_names(Some(schema_of(Type::String).max_length(Some(RULE_DOMAIN_MAX)).build()))
            .additional_properties(Some(AdditionalProperties::RefOr(rules)))
            .into()
    }

    fn components(components: &mut Components) {
        <HeaderRuleBody as BodyValue>::components(components);
    }
}

body! {
    /// A rule for the requests to a domain.
    struct HeaderRuleBody {
        /// What is changed in requests.
        "transform" transform: Option<HeaderTransformBody>;
    }
}

body! {
    /// What is changed in requests.
    struct HeaderTransformBody {
        /// Headers to set, at most 20. Values may contain `${e2b.secrets.NAME}`.
        "headers" headers: Option<HeaderValues>;
    }
}

impl HeaderRuleBody {
    fn spec(self) -> RuleSpec {
        RuleSpec {
            transform: self.transform.map(|transform| TransformSpec {
                headers: transform.headers.map(|HeaderValues(headers)| headers),
            }),
        }
    }
}

/// Headers with their values, which may be secrets.
struct HeaderValues(BTreeMap<String, Secret>);

impl BodyValue for HeaderValues {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        let headers = Texts::read(value, at)?;
        if headers.len() > RULE_HEADERS_MAX {
            return Err(at.error(format_args!("maximum number of headers is {RULE_HEADERS_MAX}")));
        }
        for (name, value) in &headers {
            let at = at.key(name);
            check_length(name, &at, RULE_HEADER_NAME_MAX)?;
            check_length(value, &at, RULE_HEADER_VALUE_MAX)?;
        }
        let headers = headers.into_iter();
        Ok(Self(headers.map(|(name, value)| (name, Secret::new(value))).collect()))
    }

    fn schema() -> RefOr<Schema> {
        texts(
            schema_of(Type::String).max_length(Some(RULE_HEADER_NAME_MAX)),
            schema_of(Type::String).max_length(Some(RULE_HEADER_VALUE_MAX)),
        )
    }
}

/// An object with any content.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AnyObject {
    /// Whether it has no keys.
    pub(crate) is_empty: bool,
}

impl BodyValue for AnyObject {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        let object = value.as_object().ok_or_else(|| at.error("value must be an object"))?;
        Ok(Self {
            is_empty: object.is_empty(),
        })
    }

    fn schema() -> RefOr<Schema> {
        schema_of(Type::Object).into()
    }
}

/// An array of at most `MAX` items of any type.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AnyArray<const MAX: usize> {
    /// Whether it has no items.
    pub(crate) is_empty: bool,
}

impl<const MAX: usize> BodyValue for AnyArray<MAX> {
    fn read(value: &Value, at: &FieldPath<'_>) -> Result<Self, ApiError> {
        let items = value.as_array().ok_or_else(|| at.error("value must be an array"))?;
        if items.len() > MAX {
            return Err(at.error(format_args!("maximum number of items is {MAX}")));
        }
        Ok(Self {
            is_empty: items.is_empty(),
        })
    }

    fn schema() -> RefOr<Schema> {
        ArrayBuilder::new().max_items((MAX < usize::MAX).then_some(MAX)).into()
    }
}
