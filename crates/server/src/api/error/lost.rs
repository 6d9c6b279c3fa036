//! The error of a create request whose template has lost a layer.

use model::id::LayerId;

use super::ApiError;
use crate::builds::lost::lost_layer;

impl ApiError {
    /// 404: a layer of the template is gone.
    pub(super) fn lost_template(layer: &LayerId) -> Self {
        Self::no_template(lost_layer(layer)).code("template_lost")
    }
}
