//! Which paths there are and which methods each takes, read off the handlers' own spec.

use poem::http::Method;
use serde_json::Value;

use crate::contract::{ApiError, Code};

/// The methods of every path below `/public/v1`.
#[derive(Clone, Debug, Default)]
pub struct Routes(Vec<Route>);

#[derive(Clone, Debug)]
struct Route {
    path: Template,
    methods: Vec<String>,
}

/// A path whose parameters are written `{name}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template(Vec<Option<String>>);

impl Routes {
    /// Reads the paths of an OpenAPI document.
    pub fn of(spec: &str) -> Self {
        let document: Value = serde_json::from_str(spec).unwrap_or_default();
        let paths = document["paths"].as_object().into_iter().flatten();
        let mut routes: Vec<_> = paths
            .map(|(path, operations)| Route {
                path: Template::of(path),
                methods: operations
                    .as_object()
                    .into_iter()
                    .flatten()
                    .map(|(method, _)| method.to_uppercase())
                    .collect(),
            })
            .collect();
        // The router takes a literal segment before a parameter, so it is found first here too.
        routes.sort_by_key(|route| route.path.parameters());
        Self(routes)
    }

    /// Fails with `NOT_FOUND` for a path that there is not, and with `METHOD_NOT_ALLOWED` for one that
    /// takes other methods.
    pub fn check(&self, method: &Method, path: &str) -> Result<(), ApiError> {
        let route = self
            .0
            .iter()
            .find(|route| route.path.fits(path))
            .ok_or_else(|| ApiError::new(Code::NotFound, "There is nothing at this path."))?;
        if route.methods.iter().any(|known| known == method.as_str()) {
            return Ok(());
        }
        Err(ApiError::method_not_allowed(route.methods.join(", ")))
    }
}

impl Template {
    /// Reads a path as OpenAPI writes it.
    pub fn of(path: &str) -> Self {
        Self(
            segments(path)
                .map(|segment| (!segment.starts_with('{')).then(|| segment.to_owned()))
                .collect(),
        )
    }

    fn parameters(&self) -> usize {
        self.0.iter().filter(|part| part.is_none()).count()
    }

    /// Whether a path is one of these.
    pub fn fits(&self, path: &str) -> bool {
        self.0.len() == segments(path).count()
            && self
                .0
                .iter()
                .zip(segments(path))
                .all(|(known, given)| match known {
                    Some(known) => known == given,
                    None => !given.is_empty(),
                })
    }
}

fn segments(path: &str) -> std::str::Split<'_, char> {
    path.trim_start_matches('/').split('/')
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
