-- Until when the receiver asked not to be sent to (429 with Retry-After): holds through a pause too.
ALTER TABLE webhook_deliveries ADD COLUMN not_before TIMESTAMPTZ;
