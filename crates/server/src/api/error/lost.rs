//! Errors of what the platform needs and has not: layers of templates, and the database.

use http::StatusCode;
use model::id::LayerId;

use super::{ApiError, READY_AFTER_S};
use crate::builds::lost::lost_layer;

impl ApiError {
    /// 503: the database does not answer.
    pub(crate) fn no_database() -> Self {
        let why = "the database of the platform does not answer: try again in a moment";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, why).retry_after(READY_AFTER_S)
    }

    /// 404: a layer of the template is gone.
    pub(super) fn lost_template(layer: &LayerId) -> Self {
        Self::no_template(lost_layer(layer)).code("template_lost")
    }
}
