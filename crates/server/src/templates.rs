//! Resolving template names of a team to templates and builds.

use model::id::TeamId;
use store::Store;
use store::error::StoreError;
use store::builds::BuildRow;
use store::templates::TemplateRow;

/// The template from which SDKs create sandboxes with MCP servers if the caller names no other.
const MCP_GATEWAY: &str = "mcp-gateway";

/// The text is not a valid template name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid template reference {0:?}")]
pub(crate) struct InvalidTemplateName(String);

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

/// A template as a client names it: `[namespace/]name[:tag]`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TemplateName {
    namespace: Option<String>,
    /// The bare name, or the id.
    pub(crate) name: String,
    /// The tag, unless it is `default`.
    pub(crate) tag: Option<String>,
}

impl TemplateName {
    pub(crate) fn parse(text: &str) -> Result<Self, InvalidTemplateName> {
        let lower = text.trim().to_ascii_lowercase();
        let (path, tag) = match lower.split_once(':') {
            Some((path, tag)) => (path, Some(tag)),
            None => (lower.as_str(), None),
        };
        let (namespace, name) = match path.split_once('/') {
            Some((namespace, name)) => (Some(namespace), name),
            None => (None, path),
        };
        let word = |text: &str, extra: &[u8]| {
            let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || extra.contains(&byte);
            !text.is_empty() && text.bytes().all(allowed)
        };
        let valid = word(name, b"-_")
            && namespace.is_none_or(|namespace| word(namespace, b"-_"))
            && tag.is_none_or(|tag| word(tag, b"-_."));
        if !valid {
            return Err(InvalidTemplateName(text.to_owned()));
        }
        Ok(Self {
            namespace: namespace.map(str::to_owned),
            name: name.to_owned(),
            tag: tag.filter(|tag| *tag != "default").map(str::to_owned),
        })
    }

    /// The template that the name resolves to for a team, if any.
    pub(crate) async fn resolve(&self, store: &Store, team: &TeamId) -> Result<Option<TemplateRow>, StoreError> {
        if let Some(namespace) = &self.namespace {
            // A team can use no namespace but its own.
            let owner = store.team_by_name(namespace).await?;
            if owner.is_none_or(|owner| owner.id != *team) {
                return Ok(None);
            }
        }
        let found = store.template_resolve(team, &self.name).await?;
        Ok(found.filter(|row| self.namespace.is_none() || row.team_id.as_ref() == Some(team)))
    }

    /// The template that the name resolves to for a team, with its newest finished build.
    pub(crate) async fn find_build(
        &self,
        store: &Store,
        team: &TeamId,
    ) -> Result<(TemplateRow, BuildRow), TemplateError> {
        let name = || self.name.clone();
        let Some(template) = self.resolve(store, team).await? else {
            return Err(match self.name == MCP_GATEWAY {
                true => TemplateError::McpGateway,
                false => TemplateError::Unknown { name: name() },
            });
        };
        if let Some(tag) = &self.tag {
            let tag = tag.clone();
            return Err(TemplateError::UnknownTag { name: name(), tag });
        }
        match store.build_latest_ready(&template.id).await? {
            Some(build) => Ok((template, build)),
            None => Err(TemplateError::NotBuilt { name: name() }),
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
        check("base:default", Some((None, "base", None)));
        for bad in ["", ":", "a/b/c", "a:b:c", "ba se", "a/", "/a", "a:", "é", "a.b", "a\0"] {
            check(bad, None);
        }
    }
}
