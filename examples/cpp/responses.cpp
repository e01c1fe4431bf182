// Has a response made in the background, watches it, and goes on with its conversation. Both are kept.
//
//   responses 127.0.0.1:8001
#include <grpcpp/grpcpp.h>

#include <iostream>
#include <stdexcept>

#include "baton/v1/inference.grpc.pb.h"

using namespace baton::v1;

CreateResponseRequest RequestFor(const std::string& question) {
  CreateResponseRequest request;
  ItemMessage* message = request.add_input()->mutable_message();
  message->set_role("user");
  message->set_text(question);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stop()->set_max_tokens(32);
  return request;
}

void SetDeadline(grpc::ClientContext& context) {
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
}

// The id of a response that is made whether or not anybody waits for it.
std::string Begin(InferenceService::Stub& stub, CreateResponseRequest request) {
  request.set_background(true);
  grpc::ClientContext context;
  SetDeadline(context);
  auto reader = stub.CreateResponse(&context, request);
  CreateResponseResponse answer;
  if (!reader->Read(&answer)) {
    throw std::runtime_error(reader->Finish().error_message());
  }
  context.TryCancel();
  return answer.event().response().id();
}

// Prints a response's text as it comes; its id.
template <typename Answer>
std::string Print(grpc::ClientReader<Answer>& reader) {
  Answer answer;
  std::string id;
  while (reader.Read(&answer)) {
    std::cout << answer.event().text().text() << std::flush;
    if (answer.event().has_response()) {
      id = answer.event().response().id();
    }
  }
  const grpc::Status status = reader.Finish();
  if (!status.ok()) {
    throw std::runtime_error(status.error_message());
  }
  std::cout << "\n";
  return id;
}

int main(int argc, char** argv) {
  const std::string address = argc > 1 ? argv[1] : "127.0.0.1:8001";
  auto stub = InferenceService::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));

  WatchResponseRequest watched;
  watched.set_response_id(Begin(*stub, RequestFor("Tell me a story about a dog and a river.")));
  grpc::ClientContext watching;
  SetDeadline(watching);
  Print(*stub->WatchResponse(&watching, watched));

  CreateResponseRequest next = RequestFor("And then?");
  next.set_previous_response_id(watched.response_id());
  grpc::ClientContext going_on;
  SetDeadline(going_on);
  std::cout << Print(*stub->CreateResponse(&going_on, next)) << "\n";
  return 0;
}
