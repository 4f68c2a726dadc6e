//! JSON kept as `TEXT` in both databases, so that what was written comes back byte for byte.

use serde::{Serialize, de::DeserializeOwned};
use sqlx::{Database, Decode, Encode, Type, encode::IsNull, error::BoxDynError};

/// A value that is stored as its JSON text.
#[derive(Clone, Debug, Default)]
pub struct JsonText<T>(pub T);

impl<T, D: Database> Type<D> for JsonText<T>
where
    String: Type<D>,
{
    fn type_info() -> D::TypeInfo {
        <String as Type<D>>::type_info()
    }

    fn compatible(ty: &D::TypeInfo) -> bool {
        <String as Type<D>>::compatible(ty)
    }
}

impl<'q, T: Serialize, D: Database> Encode<'q, D> for JsonText<T>
where
    String: Encode<'q, D>,
{
    fn encode_by_ref(&self, buffer: &mut D::ArgumentBuffer) -> Result<IsNull, BoxDynError> {
        serde_json::to_string(&self.0)?.encode(buffer)
    }
}

impl<'r, T: DeserializeOwned, D: Database> Decode<'r, D> for JsonText<T>
where
    &'r str: Decode<'r, D>,
{
    fn decode(value: D::ValueRef<'r>) -> Result<Self, BoxDynError> {
        Ok(Self(serde_json::from_str(<&str as Decode<D>>::decode(value)?)?))
    }
}
