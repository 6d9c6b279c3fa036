//! Resolving template names of a team to templates and builds.

use model::id::TeamId;
use store::Store;
use store::builds::{BuildRow, DEFAULT_TAG};
use store::error::StoreError;
use store::templates::TemplateRow;

/// The template from which SDKs create sandboxes with MCP servers if the caller names no other.
const MCP_GATEWAY: &str = "mcp-gateway";

/// Maximum length of a tag.
pub(crate) const TAG_MAX: usize = 128;

/// A text that is not a valid template name, or is none that is given any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InvalidTemplateName {
    #[error("invalid template reference {0:?}")]
    Malformed(String),
    #[error("invalid template reference {0:?}: names and tags begin with a letter, a digit or an underscore")]
    Start(String),
}

/// Why a name does not resolve to a build that a sandbox can be created from.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TemplateError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("template {name:?} is unknown to the team")]
    Unknown { name: String },
    #[error("the template of MCP servers is not available")]
    McpGateway,
    #[error("template {name:?} has no build with tag {tag:?}")]
    UnknownTag { name: String, tag: String },
    #[error("template {name:?} has no finished build")]
    NotBuilt { name: String },
}

/// The name of a template in the form of clients: `[namespace/]name[:tag]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TemplateName {
    pub(crate) namespace: Option<String>,
    /// The bare name, or the id.
    pub(crate) name: String,
    /// The tag, or the id of a build.
    pub(crate) tag: Option<String>,
}

/// Whether a text consists of lower-case letters, digits and these.
fn is_word(text: &str, extra: &[u8]) -> bool {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || extra.contains(&byte);
    !text.is_empty() && text.bytes().all(allowed)
}

/// Whether a name or a tag can be given. With a dash, command lines would read it as an option, and `.` and `..` have a
/// meaning in paths.
fn begins_well(text: &str) -> bool {
    !text.starts_with(['-', '.'])
}

/// A tag that is to be assigned, in the form in which it is stored.
pub(crate) fn new_tag(text: &str) -> Result<String, InvalidTemplateName> {
    let tag = parse_tag(text)?;
    if begins_well(&tag) {
        Ok(tag)
    } else {
        Err(InvalidTemplateName::Start(text.to_owned()))
    }
}

/// A tag that a template may have, in the form in which it is stored.
pub(crate) fn parse_tag(text: &str) -> Result<String, InvalidTemplateName> {
    let tag = text.trim().to_ascii_lowercase();
    // A reference could not tell it from the id of a build.
    let is_build = uuid::Uuid::try_parse(&tag).is_ok();
    if is_word(&tag, b"-_.") && tag.len() <= TAG_MAX && !is_build {
        Ok(tag)
    } else {
        Err(InvalidTemplateName::Malformed(text.to_owned()))
    }
}

impl TemplateName {
    /// The name that a template is to get. Of those that exist, some begin with a dash.
    pub(crate) fn new(text: &str) -> Result<Self, InvalidTemplateName> {
        let name = Self::parse(text)?;
        if begins_well(&name.name) && name.tag.as_deref().is_none_or(begins_well) {
            Ok(name)
        } else {
            Err(InvalidTemplateName::Start(text.to_owned()))
        }
    }

    pub(crate) fn parse(text: &str) -> Result<Self, InvalidTemplateName> {
        let lower = text.trim().to_ascii_lowercase();
        let (path, tag) = match lower.split_once(':') {
            Some((path, tag)) => (path.trim(), Some(tag.trim())),
            None => (lower.as_str(), None),
        };
        let (namespace, name) = match path.split_once('/') {
            Some((namespace, name)) => (Some(namespace.trim()), name.trim()),
            None => (None, path),
        };
        let valid = is_word(name, b"-_")
            && namespace.is_none_or(|namespace| is_word(namespace, b"-_"))
            && tag.is_none_or(|tag| is_word(tag, b"-_."));
        if !valid {
            return Err(InvalidTemplateName::Malformed(text.to_owned()));
        }
        Ok(Self {
            namespace: namespace.map(str::to_owned),
            name: name.to_owned(),
            tag: tag.map(str::to_owned),
        })
    }

    /// The tag, or the id of a build, that the name refers to.
    pub(crate) fn tag(&self) -> &str {
        self.tag.as_deref().unwrap_or(DEFAULT_TAG)
    }

    /// Whether the namespace, if there is one, is that of the team.
    pub(crate) async fn is_own(&self, store: &Store, team: &TeamId) -> Result<bool, StoreError> {
        match &self.namespace {
            None => Ok(true),
            Some(namespace) => Ok(store.team_slug(team).await?.as_ref() == Some(namespace)),
        }
    }

    /// The template that the name resolves to for a team, if any. With a namespace only the names in it count, and
    /// without one also ids.
    pub(crate) async fn resolve(&self, store: &Store, team: &TeamId) -> Result<Option<TemplateRow>, StoreError> {
        let Some(namespace) = &self.namespace else {
            return store.template_resolve(team, &self.name).await;
        };
        let Some(owner) = store.team_by_slug(namespace).await? else {
            return Ok(None);
        };
        let found = store.template_by_alias(&owner.id, &self.name).await?;
        Ok(found.filter(|row| row.public || owner.id == *team))
    }

    /// The template that the name resolves to for a team, with the build of its tag.
    pub(crate) async fn find_build(
        &self,
        store: &Store,
        team: &TeamId,
    ) -> Result<(TemplateRow, BuildRow), TemplateError> {
        let name = || self.name.clone();
        let Some(template) = self.resolve(store, team).await? else {
            return Err(if self.name == MCP_GATEWAY {
                TemplateError::McpGateway
            } else {
                TemplateError::Unknown { name: name() }
            });
        };
        match store.build_by_tag(&template.id, self.tag()).await? {
            Some(build) => Ok((template, build)),
            None if self.tag() == DEFAULT_TAG => Err(TemplateError::NotBuilt { name: name() }),
            None => Err(TemplateError::UnknownTag {
                name: name(),
                tag: self.tag().to_owned(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn template_names_are_parsed() {
        let check = |text: &str, want: Option<(Option<&str>, &str, Option<&str>)>| {
            let want = want.map(|(namespace, name, tag)| TemplateName {
                namespace: namespace.map(str::to_owned),
                name: name.to_owned(),
                tag: tag.map(str::to_owned),
            });
            assert_eq!(TemplateName::parse(text).ok(), want, "{text}");
        };
        check("base", Some((None, "base", None)));
        check("  BASE ", Some((None, "base", None)));
        check("team/base:v1.2", Some((Some("team"), "base", Some("v1.2"))));
        check("base:default", Some((None, "base", Some("default"))));
        check(" Team / Base : V1 ", Some((Some("team"), "base", Some("v1"))));
        for bad in ["", ":", "a/b/c", "a:b:c", "ba se", "a/", "/a", "a:", "é", "a.b", "a\0"] {
            check(bad, None);
        }
    }

    #[test]
    fn tags_are_no_build_ids() {
        for (text, want) in [
            ("v1", Some("v1")),
            (" V1.0_x-y ", Some("v1.0_x-y")),
            ("", None),
            ("a b", None),
            ("a:b", None),
            ("0b0e1d52-58ff-4c8e-8f0d-0a1b2c3d4e5f", None),
        ] {
            assert_eq!(parse_tag(text).ok().as_deref(), want, "{text}");
            assert_eq!(new_tag(text).ok().as_deref(), want, "{text}");
        }
    }

    #[test]
    fn what_begins_like_an_option_is_known_but_not_given() {
        for text in ["-rf", "--", "a:-x", "a:.", "a:..", "t/-rf", " -RF "] {
            assert!(TemplateName::parse(text).is_ok(), "{text}");
            let refused = TemplateName::new(text).unwrap_err();
            assert!(refused.to_string().contains("begin with a letter"), "{refused}");
        }
        for tag in ["-x", ".", "..", ".x", " -X"] {
            assert!(parse_tag(tag).is_ok(), "{tag}");
            assert_eq!(new_tag(tag), Err(InvalidTemplateName::Start(tag.to_owned())));
        }
        for text in ["a-", "_a", "0", "t/a:1.-"] {
            assert!(TemplateName::new(text).is_ok(), "{text}");
        }
    }
}
