//! Which methods each path takes, read off the handlers' own spec, for `Allow` on a 405.

use poem::http::Method;
use serde_json::Value;

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

    /// The methods that a path takes instead, if it takes others than this one alone.
    pub fn instead_of(&self, method: &Method, path: &str) -> Option<String> {
        let segments: Vec<_> = path.trim_start_matches('/').split('/').collect();
        let template = self.0.iter().find(|template| {
            template.segments.len() == segments.len()
                && template
                    .segments
                    .iter()
                    .zip(&segments)
                    .all(|(known, given)| known.as_ref().is_none_or(|known| known == given))
        })?;
        let known = template
            .methods
            .iter()
            .any(|known| known == method.as_str());
        (!known).then(|| template.methods.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use poem::http::Method;

    use super::Routes;

    #[test]
    fn a_path_names_the_methods_it_takes() {
        let routes = Routes::of(
            r#"{"paths": {"/a": {"get": {}, "post": {}}, "/a/{id}": {"patch": {}}, "/a/count": {"get": {}}}}"#,
        );
        assert_eq!(routes.instead_of(&Method::GET, "/a"), None);
        assert_eq!(
            routes.instead_of(&Method::PUT, "/a").as_deref(),
            Some("GET, POST")
        );
        assert_eq!(
            routes.instead_of(&Method::POST, "/a/count").as_deref(),
            Some("GET")
        );
        assert_eq!(
            routes.instead_of(&Method::POST, "/a/1").as_deref(),
            Some("PATCH")
        );
        assert_eq!(routes.instead_of(&Method::POST, "/b"), None);
    }
}
