//! The body of an upload: a component, checked before anything is written.

use poem::{Request, RequestBody};
use poem_openapi::{
    ApiExtractor, ApiExtractorType, ExtractParamOptions,
    error::ContentTypeError,
    registry::{MetaMediaType, MetaRequest, MetaSchema, MetaSchemaRef},
};

use super::{Exports, inspect};
use crate::contract::{ApiError, Code};

const WASM: &str = "application/wasm";

/// A component that may become a version of a plugin.
#[derive(Debug)]
pub struct Upload {
    /// The bytes.
    pub component: Vec<u8>,
    /// The functions it has.
    pub exports: Exports,
}

impl<'a> ApiExtractor<'a> for Upload {
    const TYPES: &'static [ApiExtractorType] = &[ApiExtractorType::RequestObject];
    type ParamType = ();
    type ParamRawType = ();

    fn request_meta() -> Option<MetaRequest> {
        let schema = MetaSchema::new_with_format("string", "binary");
        Some(MetaRequest {
            description: Some(
                "A WebAssembly component of a world of `botix:webhook`, at most 16 MiB.",
            ),
            content: vec![MetaMediaType {
                content_type: WASM,
                schema: MetaSchemaRef::Inline(Box::new(schema)),
            }],
            required: true,
        })
    }

    async fn from_request(
        request: &'a Request,
        body: &mut RequestBody,
        _: ExtractParamOptions<()>,
    ) -> poem::Result<Self> {
        match request.content_type() {
            Some(content_type) if content_type.trim().eq_ignore_ascii_case(WASM) => {}
            Some(other) => {
                return Err(ContentTypeError::NotSupported {
                    content_type: other.to_owned(),
                }
                .into());
            }
            None => return Err(ContentTypeError::ExpectContentType.into()),
        }
        let component = <Vec<u8> as poem::FromRequest>::from_request(request, body).await?;
        let checked = tokio::task::spawn_blocking(move || {
            inspect(&component).map(|exports| (component, exports))
        })
        .await
        .map_err(ApiError::internal)?;
        let (component, exports) =
            checked.map_err(|refusal| ApiError::new(Code::PluginInvalid, refusal.to_string()))?;
        Ok(Self { component, exports })
    }
}
