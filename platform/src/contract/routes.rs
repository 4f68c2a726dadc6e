//! Which paths there are and which methods each takes, read off the handlers' own spec.

use poem::http::Method;
use serde_json::Value;

use crate::contract::{ApiError, Code};

/// The methods of every path below `/public/v1`.
#[derive(Clone, Debug, Default)]
pub struct Routes(Vec<Template>);

#[derive(Clone, Debug)]
struct Template {
    segments: Vec<Option<String>>,
    methods: Vec<String>,
}

impl Routes {
    /// Reads the paths of an OpenAPI document.
    pub fn of(spec: &str) -> Self {
        let document: Value = serde_json::from_str(spec).unwrap_or_default();
        let paths = document["paths"].as_object().into_iter().flatten();
        let mut templates: Vec<_> = paths
            .map(|(path, operations)| Template {
                segments: path
                    .trim_start_matches('/')
                    .split('/')
                    .map(|segment| (!segment.starts_with('{')).then(|| segment.to_owned()))
                    .collect(),
                methods: operations
                    .as_object()
                    .into_iter()
                    .flatten()
                    .map(|(method, _)| method.to_uppercase())
                    .collect(),
            })
            .collect();
        // The router takes a literal segment before a parameter, so it is found first here too.
        templates.sort_by_key(|template| {
            template
                .segments
                .iter()
                .filter(|part| part.is_none())
                .count()
        });
        Self(templates)
    }

    /// Fails with `NOT_FOUND` for a path that there is not, and with `METHOD_NOT_ALLOWED` for one that
    /// takes other methods.
    pub fn check(&self, method: &Method, path: &str) -> Result<(), ApiError> {
        let segments: Vec<_> = path.trim_start_matches('/').split('/').collect();
        let template = self
            .0
            .iter()
            .find(|template| template.fits(&segments))
            .ok_or_else(|| ApiError::new(Code::NotFound, "There is nothing at this path."))?;
        if template
            .methods
            .iter()
            .any(|known| known == method.as_str())
        {
            return Ok(());
        }
        Err(ApiError::method_not_allowed(template.methods.join(", ")))
    }
}

impl Template {
    fn fits(&self, path: &[&str]) -> bool {
        self.segments.len() == path.len()
            && self
                .segments
                .iter()
                .zip(path)
                .all(|(known, given)| match known {
                    Some(known) => known == given,
                    None => !given.is_empty(),
                })
    }
}

#[cfg(test)]
mod tests {
    use poem::http::Method;

    use super::Routes;
    use crate::contract::Code;

    #[test]
    fn a_path_takes_its_own_methods_alone() {
        let routes = Routes::of(
            r#"{"paths": {"/a": {"get": {}, "post": {}}, "/a/{id}": {"patch": {}}, "/a/count": {"get": {}}}}"#,
        );
        let code = |method, path| routes.check(&method, path).err().map(|error| error.code());
        assert_eq!(code(Method::GET, "/a"), None);
        assert_eq!(code(Method::PATCH, "/a/1"), None);
        for (method, path) in [
            (Method::PUT, "/a"),
            (Method::POST, "/a/count"),
            (Method::GET, "/a/1"),
        ] {
            assert_eq!(code(method, path), Some(Code::MethodNotAllowed), "{path}");
        }
        for path in ["/b", "/a/", "/a//", "/a/1/2", "/A"] {
            assert_eq!(code(Method::GET, path), Some(Code::NotFound), "{path}");
        }
    }
}
