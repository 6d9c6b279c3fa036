//! Responses about templates that cannot be used, read or changed.

use http::StatusCode;
use model::id::LayerId;
use store::tags::TAGS_MAX;

use crate::api::describe::error_sets;
use crate::api::error::ApiError;
use crate::builds::lost::lost_layer;
use crate::templates::{InvalidTemplateName, TemplateError, TemplateName};

error_sets! {
    /// There is no such template.
    NoTemplate {
        404 "The team has no such template";
    }
    /// There is no such template of the team.
    NotOwnTemplate {
        403 "The template belongs to another team";
        404 "The team has no such template";
    }
    /// There is no such build of a template of the team.
    NotOwnBuild {
        403 "The template belongs to another team";
        404 "The team has no such template, or it has no such build";
    }
}

impl ApiError {
    /// 404: no sandbox can be created from the template.
    pub(crate) fn no_template(why: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, why)
    }

    /// 404: the template does not exist or belongs to another team; the response is the same.
    pub(crate) fn unknown_template(name: &str) -> Self {
        Self::no_template(format!(
            "template \"{name}\" doesn't exist or you don't have access to it"
        ))
    }

    /// 403: the template is one that the team can use and not change.
    pub(crate) fn foreign_template(name: &str) -> Self {
        Self::forbidden(format!("template \"{name}\" does not belong to your team"))
    }

    /// 400: the template would have too many tags.
    pub(crate) fn tag_limit() -> Self {
        Self::invalid(format!(
            "a template can have {TAGS_MAX} tags: remove some with DELETE /templates/tags"
        ))
    }

    /// 404: a layer of the template is gone.
    pub(crate) fn lost_template(layer: &LayerId) -> Self {
        Self::no_template(lost_layer(layer)).code("template_lost")
    }

    /// 400: the namespace of the name is that of another team.
    pub(crate) fn foreign_namespace(name: &TemplateName) -> Self {
        let namespace = name.namespace.as_deref().unwrap_or_default();
        Self::invalid(format!("namespace \"{namespace}\" is not that of your team"))
    }
}

impl From<InvalidTemplateName> for ApiError {
    fn from(error: InvalidTemplateName) -> Self {
        Self::invalid(error.to_string())
    }
}

impl From<TemplateError> for ApiError {
    fn from(error: TemplateError) -> Self {
        match error {
            TemplateError::Store(error) => error.into(),
            TemplateError::Unknown { name } => Self::unknown_template(&name),
            TemplateError::McpGateway => Self::no_template(
                "template \"mcp-gateway\" is not available on this platform: it would contain the program that runs the \
                 servers in `mcp`; name a template of yours that has this program",
            ),
            TemplateError::UnknownTag { name, tag } => {
                Self::no_template(format!("template \"{name}\" has no build with tag \"{tag}\""))
            }
            TemplateError::NotBuilt { name } => Self::no_template(format!(
                "template \"{name}\" has no finished build with tag \"default\""
            )),
        }
    }
}
