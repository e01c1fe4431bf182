// Has the model call a function, calls it, and streams what the model says to the result.
//
//   tools 127.0.0.1:8001
#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>
#include <grpcpp/grpcpp.h>

#include <iostream>
#include <stdexcept>

#include "baton/v1/inference.grpc.pb.h"

using namespace baton::v1;

constexpr char kParameters[] = R"({
  "type": "object",
  "properties": {
    "city": {"enum": ["Paris", "Rome"]},
    "days": {"type": "integer", "minimum": 1, "maximum": 9}
  },
  "required": ["city", "days"],
  "additionalProperties": false
})";

std::string GetWeather(const std::string& arguments) {
  google::protobuf::Struct parsed;
  if (!google::protobuf::util::JsonStringToMessage(arguments, &parsed).ok()) {
    throw std::runtime_error("the arguments are no JSON object: " + arguments);
  }
  const auto& fields = parsed.fields();
  const int days = static_cast<int>(fields.at("days").number_value());
  return std::to_string(days) + " sunny days in " + fields.at("city").string_value();
}

// The assistant's message, put together from its pieces.
ChatMessage Ask(InferenceService::Stub& stub, const ChatPrompt& chat) {
  GenerateRequest request;
  *request.mutable_chat() = chat;
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stop()->set_max_tokens(100);

  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  auto reader = stub.Generate(&context, request);
  ChatMessage answer;
  answer.set_role("assistant");
  GenerateResponse response;
  while (reader->Read(&response)) {
    answer.mutable_content()->append(response.text());
    for (const ToolCallDelta& piece : response.tool_calls()) {
      if (!piece.id().empty()) {
        ToolCall* call = answer.add_tool_calls();
        call->set_id(piece.id());
        call->set_name(piece.name());
      }
      answer.mutable_tool_calls(piece.index())->mutable_arguments()->append(piece.arguments());
    }
  }
  const grpc::Status status = reader->Finish();
  if (!status.ok()) {
    throw std::runtime_error(status.error_message());
  }
  return answer;
}

int main(int argc, char** argv) {
  const std::string address = argc > 1 ? argv[1] : "127.0.0.1:8001";
  auto stub = InferenceService::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));

  ChatPrompt chat;
  Tool* tool = chat.add_tools();
  tool->set_name("get_weather");
  tool->set_description("The weather of the next days.");
  tool->set_parameters_schema(kParameters);
  ChatMessage* question = chat.add_messages();
  question->set_role("user");
  question->set_content("What is the weather in Paris?");

  chat.mutable_tool_choice()->set_function_name("get_weather");
  *chat.add_messages() = Ask(*stub, chat);
  const auto calls = chat.messages(1).tool_calls();
  for (const ToolCall& call : calls) {
    ChatMessage* result = chat.add_messages();
    result->set_role("tool");
    result->set_tool_call_id(call.id());
    result->set_content(GetWeather(call.arguments()));
    std::cout << call.name() << call.arguments() << " = " << result->content() << "\n";
  }

  chat.mutable_tool_choice()->set_mode(TOOL_MODE_NONE);
  std::cout << Ask(*stub, chat).content() << "\n";
  return 0;
}
