//! Contacts: the people a project talks to.
//!
//! A phone number is unique in its project. The count is kept beside the rows, in the same
//! transaction, spread over 64 rows so that concurrent writers of one project rarely wait for
//! each other.

use poem_openapi::{OpenApi, param::Path, types::MaybeUndefined};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::values::{Attributes, Email, Phone, Tags};

use crate::{
    contract::{
        ApiError, Body, Caller, Code, Created, NoContent, Reply, Work,
        auth::ProjectId,
        cursor::Position,
        page::{self, ListTexts, Listed, Page, PageRequest},
        spec::Tag,
        text::Text,
    },
    db::{Db, Id, JsonText, Kind, Queryable, Timestamp, execute, fetch_one, fetch_optional},
    webhooks::events,
};

const SHARDS: i64 = 64;

/// A contact; names the kind of its id.
pub struct ContactKind;

impl Kind for ContactKind {
    const PREFIX: &'static str = "con";
}

/// The id of a contact.
pub type ContactId = Id<ContactKind>;

/// A contact.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Contact {
    /// Its id.
    pub id: ContactId,
    /// Its phone number, unique in the project.
    pub phone: String,
    /// Its name.
    pub name: Option<String>,
    /// Its e-mail address.
    pub email: Option<String>,
    /// Its tags.
    pub tags: Tags,
    /// Its free members.
    pub attributes: Attributes,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it was last changed.
    pub updated_at: Timestamp,
}

/// What makes a contact.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NewContact {
    /// Its phone number in E.164.
    phone: Phone,
    /// Its name.
    name: Option<Text<200>>,
    /// Its e-mail address.
    email: Option<Email>,
    /// Its tags.
    #[serde(default)]
    tags: Option<Tags>,
    /// Its free members.
    #[serde(default)]
    attributes: Option<Attributes>,
}

/// What changes a contact: absent members stay, null clears.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ContactChange {
    /// Its phone number in E.164; cannot be cleared.
    #[serde(default)]
    #[schemars(with = "Phone")]
    phone: MaybeUndefined<Phone>,
    /// Its name.
    #[serde(default)]
    #[schemars(with = "Option<Text<200>>")]
    name: MaybeUndefined<Text<200>>,
    /// Its e-mail address.
    #[serde(default)]
    #[schemars(with = "Option<Email>")]
    email: MaybeUndefined<Email>,
    /// Its tags, all of them.
    #[serde(default)]
    #[schemars(with = "Option<Tags>")]
    tags: MaybeUndefined<Tags>,
    /// Its free members, all of them.
    #[serde(default)]
    #[schemars(with = "Option<Attributes>")]
    attributes: MaybeUndefined<Attributes>,
}

/// How many contacts a project has.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ContactCount {
    /// The number of contacts.
    pub count: i64,
}

/// A contact that was deleted.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct DeletedContact {
    /// The id it had.
    pub id: ContactId,
}

#[derive(Debug, sqlx::FromRow)]
struct ContactRow {
    id: ContactId,
    phone: String,
    name: Option<String>,
    email: Option<String>,
    tags: JsonText<Tags>,
    attributes: JsonText<Attributes>,
    created_at: Timestamp,
    updated_at: Timestamp,
}

impl Listed for ContactRow {
    const RESOURCE: &'static str = "contacts";
    const TABLE: &'static str = "contacts";
    const COLUMNS: &'static str =
        "id, phone, name, email, tags, attributes, created_at, updated_at";
    const HAS_OFFSET: bool = true;

    fn position(&self) -> Position {
        Position {
            created_at: self.created_at,
            id: self.id.into(),
        }
    }
}

impl From<ContactRow> for Contact {
    fn from(row: ContactRow) -> Self {
        Self {
            id: row.id,
            phone: row.phone,
            name: row.name,
            email: row.email,
            tags: row.tags.0,
            attributes: row.attributes.0,
            created_at: row.created_at,
            updated_at: row.updated_at,
        }
    }
}

/// The handlers of `/contacts`.
#[derive(Debug)]
pub struct ContactsApi {
    /// The database.
    pub db: Db,
}

#[OpenApi(tag = "Tag::Contacts")]
impl ContactsApi {
    /// Create a contact
    #[oai(path = "/contacts", method = "post", operation_id = "create_contact")]
    async fn create(
        &self,
        caller: Caller,
        mut work: Work,
        body: Body<NewContact>,
    ) -> Result<Created<Contact>, ApiError> {
        let contact = insert(&mut work, caller.project, body.0).await?;
        events::publish(&mut work, caller.project, "contact.created", &contact).await?;
        count_by(&mut work, caller.project, 1).await?;
        Ok(Created {
            location: format!("/public/v1/contacts/{}", contact.id),
            body: contact,
        })
    }

    /// List contacts
    #[oai(path = "/contacts", method = "get", operation_id = "list_contacts")]
    async fn list(&self, caller: Caller, page: PageRequest) -> Result<Page<Contact>, ApiError> {
        Page::fetch(&self.db, page, caller.project, &[], |row: ContactRow| {
            Ok(row.into())
        })
        .await
    }

    /// Count contacts
    ///
    /// From a counter that is kept beside the rows.
    #[oai(
        path = "/contacts/count",
        method = "get",
        operation_id = "count_contacts"
    )]
    async fn count(&self, caller: Caller) -> Result<Reply<ContactCount>, ApiError> {
        let mut reader = self.db.read().await?;
        let (count,) = fetch_one!(
            &mut reader,
            (i64,),
            "SELECT CAST(COALESCE(SUM(count), 0) AS BIGINT) FROM contact_counts WHERE project_id = $1",
            caller.project
        )?;
        Ok(Reply(ContactCount { count }))
    }

    /// Read a contact
    #[oai(path = "/contacts/:id", method = "get", operation_id = "get_contact")]
    async fn get(&self, caller: Caller, id: Path<ContactId>) -> Result<Reply<Contact>, ApiError> {
        let mut reader = self.db.read().await?;
        Ok(Reply(find(&mut reader, caller.project, id.0).await?.into()))
    }

    /// Change a contact
    #[oai(
        path = "/contacts/:id",
        method = "patch",
        operation_id = "update_contact"
    )]
    async fn update(
        &self,
        caller: Caller,
        mut work: Work,
        id: Path<ContactId>,
        body: Body<ContactChange>,
    ) -> Result<Reply<Contact>, ApiError> {
        let row = touch(&mut work, caller.project, id.0).await?;
        let contact = change(&mut work, caller.project, row.into(), body.0).await?;
        events::publish(&mut work, caller.project, "contact.updated", &contact).await?;
        Ok(Reply(contact))
    }

    /// Delete a contact
    #[oai(
        path = "/contacts/:id",
        method = "delete",
        operation_id = "delete_contact"
    )]
    async fn delete(
        &self,
        caller: Caller,
        mut work: Work,
        id: Path<ContactId>,
    ) -> Result<NoContent, ApiError> {
        let deleted = execute!(
            &mut work,
            "DELETE FROM contacts WHERE project_id = $1 AND id = $2",
            caller.project,
            id.0
        )?;
        if deleted == 0 {
            return Err(ApiError::not_found("contact"));
        }
        let gone = DeletedContact { id: id.0 };
        events::publish(&mut work, caller.project, "contact.deleted", &gone).await?;
        count_by(&mut work, caller.project, -1).await?;
        Ok(NoContent)
    }
}

async fn find(
    on: &mut impl Queryable,
    project: ProjectId,
    id: ContactId,
) -> Result<ContactRow, ApiError> {
    fetch_optional!(
        on,
        ContactRow,
        "SELECT id, phone, name, email, tags, attributes, created_at, updated_at \
         FROM contacts WHERE project_id = $1 AND id = $2",
        project,
        id
    )?
    .ok_or_else(|| ApiError::not_found("contact"))
}

/// Finds a contact to change it, and keeps other writers from it until the transaction ends.
async fn touch(
    on: &mut impl Queryable,
    project: ProjectId,
    id: ContactId,
) -> Result<ContactRow, ApiError> {
    fetch_optional!(
        on,
        ContactRow,
        "UPDATE contacts SET updated_at = $3 WHERE project_id = $1 AND id = $2 \
         RETURNING id, phone, name, email, tags, attributes, created_at, updated_at",
        project,
        id,
        Timestamp::now()
    )?
    .ok_or_else(|| ApiError::not_found("contact"))
}

async fn insert(
    on: &mut impl Queryable,
    project: ProjectId,
    new: NewContact,
) -> Result<Contact, ApiError> {
    let now = Timestamp::now();
    let contact = Contact {
        id: ContactId::generate(),
        phone: new.phone.into(),
        name: new.name.map(|name| name.0),
        email: new.email.map(String::from),
        tags: new.tags.unwrap_or_default(),
        attributes: new.attributes.unwrap_or_default(),
        created_at: now,
        updated_at: now,
    };
    let inserted = execute!(
        on,
        "INSERT INTO contacts \
         (id, project_id, phone, name, email, tags, attributes, created_at, updated_at) \
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $8) ON CONFLICT (project_id, phone) DO NOTHING",
        contact.id,
        project,
        &contact.phone,
        contact.name.as_deref(),
        contact.email.as_deref(),
        JsonText(&contact.tags),
        JsonText(&contact.attributes),
        now
    )?;
    if inserted == 0 {
        return Err(exists());
    }
    Ok(contact)
}

async fn change(
    on: &mut impl Queryable,
    project: ProjectId,
    mut contact: Contact,
    change: ContactChange,
) -> Result<Contact, ApiError> {
    match change.phone {
        MaybeUndefined::Undefined => {}
        MaybeUndefined::Null => {
            return Err(ApiError::invalid_body(
                "/phone",
                "a contact always has a phone number",
            ));
        }
        MaybeUndefined::Value(phone) => contact.phone = phone.into(),
    }
    match change.name {
        MaybeUndefined::Undefined => {}
        MaybeUndefined::Null => contact.name = None,
        MaybeUndefined::Value(name) => contact.name = Some(name.0),
    }
    match change.email {
        MaybeUndefined::Undefined => {}
        MaybeUndefined::Null => contact.email = None,
        MaybeUndefined::Value(email) => contact.email = Some(email.into()),
    }
    match change.tags {
        MaybeUndefined::Undefined => {}
        MaybeUndefined::Null => contact.tags = Tags::default(),
        MaybeUndefined::Value(tags) => contact.tags = tags,
    }
    match change.attributes {
        MaybeUndefined::Undefined => {}
        MaybeUndefined::Null => contact.attributes = Attributes::default(),
        MaybeUndefined::Value(attributes) => contact.attributes = attributes,
    }
    let updated = execute!(
        on,
        "UPDATE contacts SET phone = $3, name = $4, email = $5, tags = $6, attributes = $7, \
         updated_at = $8 WHERE project_id = $1 AND id = $2",
        project,
        contact.id,
        &contact.phone,
        contact.name.as_deref(),
        contact.email.as_deref(),
        JsonText(&contact.tags),
        JsonText(&contact.attributes),
        contact.updated_at
    );
    match updated {
        Ok(0) => Err(ApiError::not_found("contact")),
        Ok(_) => Ok(contact),
        Err(error) if crate::db::is_unique_violation(&error) => Err(exists()),
        Err(error) => Err(error.into()),
    }
}

/// Counts last: others of the project that meet on the row wait until we commit.
async fn count_by(on: &mut impl Queryable, project: ProjectId, by: i64) -> sqlx::Result<u64> {
    let shard = rand::random_range(0..SHARDS);
    execute!(
        on,
        "INSERT INTO contact_counts (project_id, shard, count) VALUES ($1, $2, $3) \
         ON CONFLICT (project_id, shard) DO UPDATE SET count = contact_counts.count + excluded.count",
        project,
        shard,
        by
    )
}

fn exists() -> ApiError {
    ApiError::new(Code::ContactExists, Code::ContactExists.about())
}

/// The query texts of this resource's lists.
pub fn lists() -> Vec<ListTexts> {
    vec![page::texts::<ContactRow>(&[])]
}
