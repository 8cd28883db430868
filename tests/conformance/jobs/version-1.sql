pragma application_id = 1213352529;
pragma user_version = 1;
BEGIN TRANSACTION;
CREATE TABLE body (seq integer primary key, bytes blob not null);
INSERT INTO "body" VALUES(2,X'7B226D6F64656C223A226D227D');
INSERT INTO "body" VALUES(3,X'7B226D6F64656C223A226D227D');
CREATE TABLE job (
  seq integer primary key autoincrement,
  id text not null unique,
  tenant text not null,
  slo_class text not null,
  model text not null,
  key text,
  batch text,
  print blob not null,
  priority integer not null,
  deadline_ns integer not null,
  spec blob not null,
  state text not null,
  attempts integer not null,
  lost integer not null,
  owner text,
  lease_until_ns integer,
  cancel_asked integer not null,
  ended_ns integer,
  kept_until_ns integer
);
INSERT INTO "job" VALUES(1,'done','acme','batch','m',NULL,NULL,X'985DC8E932CA210371476EAF5A563F39398CD2F6BF84F05CFAF239543B56E6BE',0,1000000000000000000,X'8EA26964A4646F6E65A674656E616E74A461636D65A9736C6F5F636C617373A56261746368A56D6F64656CA16DA5726F757465B42F76312F636861742F636F6D706C6574696F6E73A76865616465727390A87072696F7269747900A7736572766963650AAA637265617465645F6E7300AB646561646C696E655F6E73CF0DE0B6B3A7640000A76B6565705F6E73CF0000000DF8475800A36B6579C0A56261746368C0A9637573746F6D5F6964C0','done',1,0,'one',NULL,0,1000000000,61000000000);
INSERT INTO "job" VALUES(2,'held','acme','batch','m',NULL,NULL,X'985DC8E932CA210371476EAF5A563F39398CD2F6BF84F05CFAF239543B56E6BE',0,1000000000000000000,X'8EA26964A468656C64A674656E616E74A461636D65A9736C6F5F636C617373A56261746368A56D6F64656CA16DA5726F757465B42F76312F636861742F636F6D706C6574696F6E73A76865616465727390A87072696F7269747900A7736572766963650AAA637265617465645F6E7300AB646561646C696E655F6E73CF0DE0B6B3A7640000A76B6565705F6E73CF0000000DF8475800A36B6579C0A56261746368C0A9637573746F6D5F6964C0','claimed',1,0,'one',30000000000,0,NULL,NULL);
INSERT INTO "job" VALUES(3,'waits','acme','batch','m','k',NULL,X'985DC8E932CA210371476EAF5A563F39398CD2F6BF84F05CFAF239543B56E6BE',3,1000000000000000000,X'8EA26964A57761697473A674656E616E74A461636D65A9736C6F5F636C617373A56261746368A56D6F64656CA16DA5726F757465B42F76312F636861742F636F6D706C6574696F6E73A76865616465727390A87072696F7269747903A7736572766963650AAA637265617465645F6E7300AB646561646C696E655F6E73CF0DE0B6B3A7640000A76B6565705F6E73CF0000000DF8475800A36B6579A16BA56261746368C0A9637573746F6D5F6964C0','queued',0,0,NULL,NULL,0,NULL,NULL);
CREATE TABLE memory (model text primary key, packed blob not null) without rowid;
INSERT INTO "memory" VALUES('m',X'86A8636F756E7465727382A71F31626174636814AD1F3162617463681F3361636D6514A673657276656482A014A71F31626174636814A46C6F777380A5686967687380A86C6173745F6F757482A0A71F316261746368A71F316261746368AD1F3162617463681F3361636D65A777616974696E6790');
CREATE TABLE owed (
  model text not null,
  tenant text not null,
  slo_class text not null,
  service integer not null,
  primary key (model, tenant, slo_class)
) without rowid;
CREATE TABLE result (seq integer primary key, packed blob not null);
INSERT INTO "result" VALUES(1,X'83A6737461747573CCC8A76865616465727390A4626F6479C404746F6C64');
CREATE TABLE tally (
  model text not null,
  state text not null,
  tenant text not null,
  slo_class text not null,
  jobs integer not null,
  primary key (model, state, tenant, slo_class)
) without rowid;
INSERT INTO "tally" VALUES('m','claimed','acme','batch',1);
INSERT INTO "tally" VALUES('m','done','acme','batch',1);
INSERT INTO "tally" VALUES('m','queued','acme','batch',1);
CREATE UNIQUE INDEX job_key on job (tenant, key) where key is not null;
CREATE INDEX job_turn on job (model, tenant, slo_class, priority, deadline_ns, seq)
  where state = 'queued';
CREATE INDEX job_due on job (deadline_ns) where state = 'queued';
CREATE INDEX job_age on job (seq) where state = 'queued';
CREATE INDEX job_lease on job (lease_until_ns) where state = 'claimed';
CREATE INDEX job_kept on job (kept_until_ns) where kept_until_ns is not null;
CREATE INDEX job_page on job (tenant, seq);
CREATE INDEX job_batch on job (tenant, batch, seq) where batch is not null;
CREATE INDEX tally_tenant on tally (tenant, state);
CREATE TRIGGER job_came after insert on job begin
  insert into tally values (new.model, new.state, new.tenant, new.slo_class, 1)
    on conflict do update set jobs = jobs + 1;
end;
CREATE TRIGGER job_moved after update of state on job when old.state <> new.state begin
  insert into tally values (new.model, new.state, new.tenant, new.slo_class, 1)
    on conflict do update set jobs = jobs + 1;
  update tally set jobs = jobs - 1 where model = old.model and state = old.state
    and tenant = old.tenant and slo_class = old.slo_class;
  delete from tally where model = old.model and state = old.state
    and tenant = old.tenant and slo_class = old.slo_class and jobs = 0;
end;
CREATE TRIGGER job_went after delete on job begin
  update tally set jobs = jobs - 1 where model = old.model and state = old.state
    and tenant = old.tenant and slo_class = old.slo_class;
  delete from tally where model = old.model and state = old.state
    and tenant = old.tenant and slo_class = old.slo_class and jobs = 0;
end;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('job',3);
COMMIT;
